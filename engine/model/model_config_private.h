/* model_config_private: what the two readers of a configuration share. */
#ifndef TANDEM_MODEL_CONFIG_PRIVATE_H
#define TANDEM_MODEL_CONFIG_PRIVATE_H

#include "model_config.h"

enum {
    CONFIG_MAX_HIDDEN = 65536,
    CONFIG_MAX_FFN = 1 << 20,
    CONFIG_MAX_HEADS = 4096,
    CONFIG_MAX_HEAD_DIM = 256,
    CONFIG_MAX_WIDTH = 1 << 18, /* heads times their width */
    CONFIG_MAX_VOCAB = 1 << 20,
    CONFIG_MAX_CONTEXT = 1 << 22,
    CONFIG_MIN_CONV = 2,
    CONFIG_MAX_CONV = 8,
    CONFIG_MULTIPLE = 16 /* of widths: what kernels step by */
};

struct config_reader {
    const struct model_file *file;
    const char *source; /* for messages */
    struct err *e;
};

/* RC_BAD_INPUT, EXIT_UNAVAILABLE. */
enum rc config_refuse(const struct config_reader *r, const char *code, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

struct config_limits {
    int min;
    int max;
    int multiple;
    int64_t fallback; /* for an absent value; -1: it is required */
};
enum rc config_check_int(const struct config_reader *r, const char *what, uint64_t value, struct config_limits limits,
                         int *out);
/* Above 0 and finite. */
enum rc config_check_real(const struct config_reader *r, const char *what, double value);

/* Fill in all but vocab, what the tensors say, and the checks of numbers against each other. */
enum rc config_read_gguf(struct config_reader *r, struct model_config *c);
enum rc config_read_hf(struct config_reader *r, struct model_config *c);

/* out: an arbitrary text as something to print, shortened. */
enum { CONFIG_WORD = 48 };
const char *config_word(const char *bytes, size_t len, char out[CONFIG_WORD]);

#endif
