/* tensor_index: an array that grows, and a sorted array of pointers into it.
 *
 * Names are looked up a few thousand times at start and never after, so that a binary search is enough; unlike a hash
 * table it has no worst case that a hostile file could choose. */
#include "tensor_index.h"

#include <stdlib.h>
#include <string.h>

struct tensor_view *tensor_index_add(struct tensor_index *t, char *name)
{
    if (t->n == t->cap) {
        size_t cap = t->cap ? 2 * t->cap : 64;
        struct tensor_view *views = realloc(t->views, cap * sizeof *views);
        if (!views) {
            free(name);
            return NULL;
        }
        t->views = views;
        t->cap = cap;
    }
    t->views[t->n] = (struct tensor_view){.name = name};
    return &t->views[t->n++];
}

static int compare(const void *a, const void *b)
{
    const struct tensor_view *const *left = a, *const *right = b;
    return strcmp((*left)->name, (*right)->name);
}

bool tensor_index_sort(struct tensor_index *t, const char **out_twin)
{
    *out_twin = NULL;
    free(t->by_name);
    t->by_name = malloc((t->n + 1) * sizeof *t->by_name);
    if (!t->by_name) return false;
    for (size_t i = 0; i < t->n; i++) t->by_name[i] = &t->views[i];
    qsort(t->by_name, t->n, sizeof *t->by_name, compare);
    for (size_t i = 1; i < t->n && !*out_twin; i++)
        if (!strcmp(t->by_name[i - 1]->name, t->by_name[i]->name)) *out_twin = t->by_name[i]->name;
    return true;
}

static void free_name(struct tensor_view *v) { free((void *)(uintptr_t)v->name); }

bool tensor_index_drop(struct tensor_index *t, const bool *drop)
{
    size_t kept = 0;
    const char *twin;
    for (size_t i = 0; i < t->n; i++) {
        if (drop[i])
            free_name(&t->views[i]);
        else
            t->views[kept++] = t->views[i];
    }
    t->n = kept;
    return tensor_index_sort(t, &twin);
}

const struct tensor_view *tensor_index_find(const struct tensor_index *t, const char *name)
{
    for (size_t low = 0, high = t->n; low < high;) {
        size_t middle = low + (high - low) / 2;
        int order = strcmp(name, t->by_name[middle]->name);
        if (!order) return t->by_name[middle];
        if (order < 0)
            high = middle;
        else
            low = middle + 1;
    }
    return NULL;
}

void tensor_index_free(struct tensor_index *t)
{
    for (size_t i = 0; i < t->n; i++) free_name(&t->views[i]);
    free(t->by_name);
    free(t->views);
    *t = (struct tensor_index){0};
}
