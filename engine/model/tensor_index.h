/* tensor_index: the tensors that one container hands out, in file order and by name.
 *
 * Private to model_file and its containers. Each container fills one; from there on they look alike. */
#ifndef TANDEM_TENSOR_INDEX_H
#define TANDEM_TENSOR_INDEX_H

#include "base.h"
#include "model_file.h"

struct tensor_index {
    struct tensor_view *views;          /* [n], file order; their names are the index's own */
    const struct tensor_view **by_name; /* [n], sorted; NULL before tensor_index_sort */
    size_t n;
    size_t cap;
};

/* One more view, all zero, which takes the name over (from malloc). NULL: no memory, and the name was freed. Views move
 * when the index grows, until tensor_index_sort. */
struct tensor_view *tensor_index_add(struct tensor_index *t, char *name);
/* Makes by_name. *out_twin: a name that is there twice, NULL when there is none. False: no memory. */
bool tensor_index_sort(struct tensor_index *t, const char **out_twin);
/* Takes the views out for which drop[i] is set, and sorts anew. False: no memory. */
bool tensor_index_drop(struct tensor_index *t, const bool *drop);
const struct tensor_view *tensor_index_find(const struct tensor_index *t, const char *name); /* NULL: absent */
void tensor_index_free(struct tensor_index *t);                                              /* back to zero */

#endif
