/* kern: what is the same for every backend. */
#include "kern.h"

#include <string.h>

static const struct {
    const char *name;
    size_t bytes;
} kv_formats[KV_FORMATS] = {[KV_F16] = {"f16", 2}, [KV_F32] = {"f32", 4}};

const char *kv_format_name(enum kv_format f) { return kv_formats[f].name; }

size_t kv_format_bytes(enum kv_format f) { return kv_formats[f].bytes; }

bool kv_format_parse(const char *name, enum kv_format *out)
{
    for (int i = 0; i < KV_FORMATS; i++) {
        if (strcmp(name, kv_formats[i].name)) continue;
        *out = (enum kv_format)i;
        return true;
    }
    return false;
}
