/* tiny_gguf: a small llama-arch GGUF with random weights in real storage formats, written to a file, for tests that need
 * no downloaded model. Deterministic from its seed. The vocabulary is the 256 bytes, a few merges and ChatML's tokens. */
#ifndef TANDEM_TINY_GGUF_H
#define TANDEM_TINY_GGUF_H

#include "quant.h"

struct tiny_gguf {
    int n_layers, hidden, ffn, n_heads, n_kv_heads, head_dim, context;
    enum quant_format matrices; /* Q4_1, Q8_0, F16, F32, Q4_0 */
    enum quant_format embedding;
    uint64_t seed;
};
/* 3 layers, hidden 96, ffn 256, 6 query and 3 KV heads of 16, Q4_1 matrices, Q8_0 embedding, context 1024. */
struct tiny_gguf tiny_gguf_default(void);

/* Writes it to path; false with errno set when the file cannot be written. */
bool tiny_gguf_write(const struct tiny_gguf *t, const char *path);

#endif
