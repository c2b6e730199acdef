/* model_synth: models whose weights are made up from a seed, in the storage formats of real releases.
 *
 * Private to model_file. For benchmarks and tests: shapes, formats and arithmetic are true, answers are noise. Every value is a
 * function of (name, seed, tensor, index) and of nothing else, so two ranks, or two machines, hold the same model. Nothing is
 * read from disk. Memory is reserved when the model is opened and filled tensor by tensor when they are asked for. */
#ifndef TANDEM_MODEL_SYNTH_H
#define TANDEM_MODEL_SYNTH_H

#include "base.h"
#include "model_file.h"
#include "tensor_index.h"

struct model_synth {
    char name[64];                         /* "qwen3.8-27b:1", with the seed; NUL-terminated */
    struct buf texts[MODEL_JSON_KINDS];    /* config.json and so on, as a real folder would hold them */
    struct tensor_index tensors;           /* with Hugging Face's names */
    struct synth_tensor *made;             /* [tensors.n] how each is made */
    unsigned char *memory;                 /* reserved; pages appear when they are filled */
    size_t n_bytes;
};

/* name: what follows "synth:", NAME[:SEED]. RC_BAD_INPUT, EXIT_NO_INPUT for an unknown name, naming those there are. *out must
 * be freed after an error too. */
enum rc model_synth_open(const char *name, struct model_synth *out, struct err *e);
void model_synth_free(struct model_synth *s); /* a zero one is fine */
/* Fills the tensor, if it is not filled yet; gives its memory back. */
void model_synth_fill(const struct model_synth *s, const struct tensor_view *t);
void model_synth_drop(const struct model_synth *s, const struct tensor_view *t);
/* Names the generator's version and the model, as 64 hex digits. */
void model_synth_digest(const struct model_synth *s, char out_hex[65]);

#endif
