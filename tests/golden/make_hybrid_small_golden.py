"""Makes tests/golden/hybrid_small.bin from the results that lie beside the model jobs/models/hybrid-small.

    python make_hybrid_small_golden.py [GOLDEN.npz] [OUT.bin]

GOLDEN.npz was made with transformers (float32, eager attention) when the model was trained; the model's README says what is in
it. Here it becomes a file that a few lines of C read, and small enough to be kept: of the logits every eighth is taken,
beginning with another one for each prompt. Before that, all of it is checked against hybrid_oracle.py in float64.

All little-endian: "TDMSMALL"; u32 prompts, vocabulary, rows, stride, continuation; for each prompt i: u32 tokens n, i32 tokens
[n], i32 greedy continuation, f32 margins between its best and second logits, f32 logits of the last `rows` positions [rows]
[vocabulary / stride] of the ids i, i + stride, ..., and the MTP layer's at the same positions.
"""
import pathlib
import struct
import sys

import numpy as np

from hybrid_oracle import read_folder

HERE = pathlib.Path(__file__).resolve().parent
MODEL = HERE.parents[1] / "jobs/models/hybrid-small"
PROMPTS, ROWS, STRIDE, MAX_APART = 6, 4, 8, 5e-5


def check(model, prompt, continuation, logits, mtp_logits):
    tokens = np.concatenate([prompt, continuation])
    n = len(prompt)
    hidden = model.hidden(tokens)
    oracle = model.logits(hidden)
    assert np.abs(oracle[n - ROWS:n] - logits).max() < MAX_APART
    assert (oracle[n - 1:-1].argmax(1) == continuation).all()
    assert np.abs(model.logits(model.mtp(tokens[1:n + 1], hidden[:n])[-ROWS:]) - mtp_logits).max() < MAX_APART


def main():
    golden = np.load(sys.argv[1] if len(sys.argv) > 1 else MODEL / "golden.npz")
    model = read_folder(MODEL)
    out = b"TDMSMALL" + struct.pack("<5I", PROMPTS, golden["logits0"].shape[1], ROWS, STRIDE, len(golden["continuation0"]))
    for i in range(PROMPTS):
        prompt, continuation = golden[f"prompt{i}"], golden[f"continuation{i}"]
        logits, mtp_logits = golden[f"logits{i}"], golden[f"mtp_logits{i}"]
        check(model, prompt, continuation, logits, mtp_logits)
        out += struct.pack("<I", len(prompt)) + prompt.astype("<i4").tobytes() + continuation.astype("<i4").tobytes()
        out += golden[f"margin{i}"].astype("<f4").tobytes()
        out += logits[:, i::STRIDE].astype("<f4").tobytes() + mtp_logits[:, i::STRIDE].astype("<f4").tobytes()
    (pathlib.Path(sys.argv[2]) if len(sys.argv) > 2 else HERE / "hybrid_small.bin").write_bytes(out)


if __name__ == "__main__":
    main()
