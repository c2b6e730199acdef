/* tokenizer_bpe: merge ranks and the merging of one piece (private to engine/text). */
#ifndef TANDEM_TOKENIZER_BPE_H
#define TANDEM_TOKENIZER_BPE_H

#include "tokenizer.h"

struct bpe;

/* Room for n_merges merges; NULL: out of memory. Free with bpe_close (NULL is fine). */
struct bpe *bpe_open(size_t n_merges);
void bpe_close(struct bpe *b);

/* Adds the next merge (its rank is the number of merges before it): left right becomes result. False: the pair is
 * there already. At most n_merges calls. */
bool bpe_add(struct bpe *b, int32_t left, int32_t right, int32_t result);

/* Merges ids[0..n) until no adjacent pair has a rank, always the lowest rank first and the leftmost among equals, and
 * appends what is left to out. O(n log n). n < 2^31. False: out of memory. */
bool bpe_merge(struct bpe *b, const int32_t *ids, size_t n, struct token_list *out);
/* Gives back scratch memory that an unusually long piece has left. */
void bpe_trim(struct bpe *b);

#endif
