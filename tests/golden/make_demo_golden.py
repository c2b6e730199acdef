"""Makes tests/golden/demo_answers.json: the first greedy tokens of the answers to jobs/examples/documents.jsonl.

    python make_demo_golden.py [MODEL]

Prompts are built here from SmolLM2's published template and the `tokenizers` package, tokens come from reference.py in
float64: nothing is shared with the program under test. A token whose margin (best minus second logit) is below NEAR_TIE is
listed as a near-tie: from there on another order of summation, or keys stored in half precision, may choose otherwise.
"""

import json
import pathlib
import subprocess
import sys

import numpy as np

from make_smollm2_golden import tokenizer_of
from reference import Model

HERE = pathlib.Path(__file__).resolve().parent
EXAMPLES = HERE.parent.parent / "jobs/examples"
COUNT = 32
NEAR_TIE = 0.05
SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"


def content_text(content):
    if isinstance(content, str):
        return content
    return "\n".join(p["text"] if p["type"] == "text" else (EXAMPLES / p["path"]).read_text() for p in content)


def prompt_ids(tokenizer, messages):
    """Markup by id, contents as ordinary text."""
    start, end = tokenizer.token_to_id("<|im_start|>"), tokenizer.token_to_id("<|im_end|>")
    if messages[0]["role"] != "system":
        messages = [{"role": "system", "content": SYSTEM}] + messages
    ids = []
    for m in messages:
        ids += [start] + tokenizer.encode(m["role"] + "\n" + content_text(m["content"])).ids + [end]
        ids += tokenizer.encode("\n").ids
    return ids + [start] + tokenizer.encode("assistant\n").ids, end


def main():
    if len(sys.argv) > 1:
        path = sys.argv[1]
    else:
        path = subprocess.check_output(["sh", HERE.parent.parent / "jobs/get-model.sh"], text=True).splitlines()[-1]
    model = Model(path, np.float64)
    tokenizer = tokenizer_of(model.reader)
    answers = []
    for line in (EXAMPLES / "documents.jsonl").read_text().splitlines():
        job = json.loads(line)
        ids, end = prompt_ids(tokenizer, job["body"]["messages"])
        tokens, margins = zip(*model.greedy(ids, COUNT, (end,)))
        ties = [{"token": i, "margin": round(m, 6)} for i, m in enumerate(margins) if m < NEAR_TIE]
        answers.append(
            {
                "custom_id": job["custom_id"],
                "prompt_tokens": len(ids),
                "tokens": tokens,
                "text": tokenizer.decode([t for t in tokens if t != end]),
                "near_ties": ties,
                "text_before_ties": tokenizer.decode(tokens[: ties[0]["token"]] if ties else tokens),
            }
        )
        print(job["custom_id"], len(ids), answers[-1]["near_ties"], flush=True)
    text = json.dumps({"made_by": "tests/golden/make_demo_golden.py", "answers": answers}, indent=1, ensure_ascii=False)
    (HERE / "demo_answers.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
