/* Frames from hostile peers: whatever decodes must encode to exactly the bytes it came from, the input is walked as a
 * stream of frames, and a decoder that is given fewer bytes must ask for more or refuse, never succeed otherwise. */
#include <stdlib.h>
#include <string.h>

#include "rank_wire.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    size_t at = 0;
    while (at < size) {
        struct wire_frame f;
        size_t used = 0;
        struct err e = {0};
        enum rc rc = wire_decode(data + at, size - at, &f, &used, &e);
        if (rc != RC_OK) {
            if (f.store.data) abort();
            break;
        }
        struct buf again = {0};
        if (!wire_encode(&f, &again)) abort();
        if (again.len != used || memcmp(again.data, data + at, used) != 0) abort();
        wire_frame_free(&f);
        if (wire_decode(data + at, used - 1, &f, &used, NULL) != RC_RETRY) abort();
        at += again.len;
        buf_free(&again);
    }
    return 0;
}
