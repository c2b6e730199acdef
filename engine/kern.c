/* kern: what is the same for every backend. */
#include "kern.h"

#include <string.h>

static const struct {
    const char *name;
    size_t value_bytes, run_bytes; /* of one value, of the scale of a run */
} kv_formats[KV_FORMATS] = {
    [KV_F16] = {"f16", 2, 0}, [KV_F32] = {"f32", 4, 0}, [KV_BF16] = {"bf16", 2, 0}, [KV_INT8] = {"int8", 1, 4}};

const char *kv_format_name(enum kv_format f) { return kv_formats[f].name; }

size_t kv_format_bytes(enum kv_format f, int head_dim)
{
    size_t n = (size_t)head_dim, runs = (n + KV_INT8_RUN - 1) / KV_INT8_RUN;
    return n * kv_formats[f].value_bytes + runs * kv_formats[f].run_bytes;
}

bool kv_format_parse(const char *name, enum kv_format *out)
{
    for (int i = 0; i < KV_FORMATS; i++) {
        if (strcmp(name, kv_formats[i].name)) continue;
        *out = (enum kv_format)i;
        return true;
    }
    return false;
}

struct kern_best kern_best_of(const struct kern_best *of_rank, int ranks)
{
    struct kern_best b = of_rank[0];
    for (int r = 1; r < ranks && b.id >= 0; r++) /* an equal logit of a later rank, whose ids are higher, loses */
        if (of_rank[r].id < 0 || of_rank[r].logit > b.logit) b = of_rank[r];
    return b;
}
