/* tokenizer_private: opening a tokenizer otherwise than its model says, for tests. */
#ifndef TANDEM_TOKENIZER_PRIVATE_H
#define TANDEM_TOKENIZER_PRIVATE_H

#include "tokenizer.h"

struct tokenizer_options {
    const char *pre;   /* pre-tokenizer name in place of the file's; NULL: the file's */
    bool no_normalize; /* leave out the NFC normalization that belongs to the Qwen families */
    bool no_jit;       /* interpret the splitting patterns */
};

/* The JSON files of a tokenizer, as their texts; bytes NULL: there is none. */
struct tokenizer_texts {
    struct model_text tokenizer, config, generation;
};

enum rc tokenizer_open_with(const struct model_file *m, const struct tokenizer_options *options, struct tokenizer **out,
                            struct err *e);
enum rc tokenizer_open_json(const struct tokenizer_texts *texts, const struct tokenizer_options *options,
                            struct tokenizer **out, struct err *e);

#endif
