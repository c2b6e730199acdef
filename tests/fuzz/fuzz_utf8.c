/* utf8_append_complete over any bytes: its output is valid, it changes nothing that was valid, and a longer input never
 * takes back what a shorter one gave. */
#include <stdlib.h>
#include <string.h>

#include "tokenizer.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct buf whole = {0}, half = {0};
    const char *bytes = size ? (const char *)data : "";
    if (!utf8_append_complete(&whole, bytes, size) || !utf8_append_complete(&half, bytes, size / 2)) abort();
    if (whole.len && !utf8_valid(whole.data, whole.len)) abort();
    if (utf8_valid(bytes, size) && (whole.len != size || (size && memcmp(whole.data, data, size) != 0))) abort();
    if (half.len > whole.len || (half.len && memcmp(half.data, whole.data, half.len) != 0)) abort();
    buf_free(&whole);
    buf_free(&half);
    return 0;
}
