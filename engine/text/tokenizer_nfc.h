/* tokenizer_nfc: Unicode normalization form C in linear-logarithmic time (private to engine/text). */
#ifndef TANDEM_TOKENIZER_NFC_H
#define TANDEM_TOKENIZER_NFC_H

#include "base.h"

/* Appends the NFC form of text[0..len), valid UTF-8, to out. False: out of memory. */
bool nfc_append(struct buf *out, const char *text, size_t len);

#endif
