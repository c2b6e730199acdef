/* tokenizer_private: opening a tokenizer otherwise than its file says, for tests that compare pre-tokenizers. */
#ifndef TANDEM_TOKENIZER_PRIVATE_H
#define TANDEM_TOKENIZER_PRIVATE_H

#include "tokenizer.h"

struct tokenizer_options {
    const char *pre;   /* pre-tokenizer name in place of the file's; NULL: the file's */
    bool no_normalize; /* leave out the NFC normalization that belongs to qwen2 */
    bool no_jit;       /* interpret the splitting patterns */
};

enum rc tokenizer_open_with(const struct model_file *m, const struct tokenizer_options *options, struct tokenizer **out,
                            struct err *e);

#endif
