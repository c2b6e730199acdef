"""Makes tests/golden/smollm2_logits.bin and its description smollm2_logits.json from the real model.

    python make_smollm2_golden.py [MODEL] [OUT.bin]

MODEL is what jobs/get-model.sh prints, by default. The text below is tokenized by the `tokenizers` package from the
vocabulary and merges in the model file, the logits are those of reference.py in float64: neither shares code with the
program under test. The layout of the file is in LAYOUT, which the description repeats.
"""

import hashlib
import importlib.metadata
import json
import pathlib
import subprocess
import sys

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from reference import Model, top_two

HERE = pathlib.Path(__file__).resolve().parent
N_TOKENS = 256
N_SAMPLE = 256
FULL_POSITIONS = [0, 63, 64, 255]  # the first, both sides of a block of 64, the last

TEXT = '''The harbour was quiet when the last ferry came in. Two men in yellow coats tied it to the pier, and the \
passengers walked down the ramp with their bags, talking about the weather, which had turned cold again. In 1987 the \
town had rebuilt the old lighthouse; since then its lamp has been switched on every evening at 18:30, even in summer.

Nobody remembers who wrote the first log book. It lists ships, cargo and crew, and on some pages there are small \
drawings of birds. The museum keeps it in a glass box next to the window.

```c
#include <stdio.h>

/* Counts the words of one line. */
static int count_words(const char *line)
{
    int words = 0, inside = 0;
    for (; *line; line++) {
        if (*line == ' ' || *line == '\\t') {
            inside = 0;
        } else if (!inside) {
            inside = 1;
            words++;
        }
    }
    return words;
}
```

The function above returns the number of words, so count_words("a b  c") is 3. A line without any letters gives \
0. What should it do with a tab at the end? Nothing special: the loop leaves the word and the count stays the same. \
For longer texts it is better to read the file in blocks and to keep the state between them.
'''

LAYOUT = [
    "all numbers little-endian; i32 and u32 integers, f32 IEEE single precision",
    "char[8] magic: TDMGOLD2",
    "u32 n_tokens, n_vocab, n_full, n_sample",
    "i32 token[n_tokens]: the input",
    "i32 best[n_tokens]: id of the largest logit after that token",
    "i32 second[n_tokens]: id of the second largest",
    "f32 margin[n_tokens]: logit of best minus logit of second",
    "f32 norm[n_tokens]: Euclidean norm of the whole row of logits",
    "f32 max_abs[n_tokens]: largest magnitude of the row",
    "i32 full_position[n_full]",
    "f32 full[n_full][n_vocab]: whole rows of logits at these positions",
    "i32 sample_id[n_sample]: ascending ids of the vocabulary",
    "f32 sample[n_tokens][n_sample]: the logits of these ids at every position",
    "f32 sample_f16[n_tokens][n_sample]: the same with keys and values rounded to IEEE half precision where they are stored",
]


def tokenizer_of(reader):
    """Byte-level BPE with every digit on its own, as pre-tokenizer `smollm` of the file asks."""
    if reader.get_field("tokenizer.ggml.pre").contents() != "smollm":
        raise ValueError("this is not the model the golden is made from")
    tokens = reader.get_field("tokenizer.ggml.tokens").contents()
    merges = [tuple(m.split(" ")) for m in reader.get_field("tokenizer.ggml.merges").contents()]
    tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def main():
    if len(sys.argv) > 1:
        path = sys.argv[1]
    else:
        path = subprocess.check_output(["sh", HERE.parent.parent / "jobs/get-model.sh"], text=True).splitlines()[-1]
    out = pathlib.Path(sys.argv[2] if len(sys.argv) > 2 else HERE / "smollm2_logits.bin")
    model = Model(path, np.float64)
    tokenizer = tokenizer_of(model.reader)
    tokens = tokenizer.encode(TEXT).ids
    if len(tokens) < N_TOKENS:
        raise ValueError(f"the text has only {len(tokens)} tokens")
    tokens = tokens[:N_TOKENS]
    logits = model.logits(tokens)
    vocab = logits.shape[1]
    best, second, margin = zip(*(top_two(row) for row in logits))
    sample = np.sort(np.random.default_rng(20260102).choice(vocab, N_SAMPLE, replace=False))
    parts = [
        b"TDMGOLD2",
        np.array([N_TOKENS, vocab, len(FULL_POSITIONS), N_SAMPLE], "<u4"),
        np.array(tokens, "<i4"),
        np.array(best, "<i4"),
        np.array(second, "<i4"),
        np.array(margin, "<f4"),
        np.linalg.norm(logits, axis=1).astype("<f4"),
        np.abs(logits).max(axis=1).astype("<f4"),
        np.array(FULL_POSITIONS, "<i4"),
        logits[FULL_POSITIONS].astype("<f4"),
        sample.astype("<i4"),
        logits[:, sample].astype("<f4"),
        Model(path, np.float64, np.float16).logits(tokens)[:, sample].astype("<f4"),
    ]
    data = b"".join(p if isinstance(p, bytes) else p.tobytes() for p in parts)
    out.write_bytes(data)
    description = {
        "made_by": "tests/golden/make_smollm2_golden.py",
        "arithmetic": "float64 on weights decoded to float32",
        "packages": {name: importlib.metadata.version(name) for name in ("gguf", "numpy", "tokenizers")},
        "model_sha256": hashlib.sha256(pathlib.Path(path).read_bytes()).hexdigest(),
        "sha256": hashlib.sha256(data).hexdigest(),
        "layout": LAYOUT,
        "text": tokenizer.decode(tokens),
        "near_ties": [{"position": i, "margin": round(m, 6)} for i, m in enumerate(margin) if m < 0.05],
    }
    out.with_suffix(".json").write_text(json.dumps(description, indent=2, ensure_ascii=False) + "\n")
    print(f"{out}: {len(data)} bytes, {len(description['near_ties'])} near-ties below 0.05")


if __name__ == "__main__":
    main()
