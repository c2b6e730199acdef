/* Fuzzes the reading of one .safetensors file: whatever opens must be readable wherever its views and scales point. */
#include <stdlib.h>

#include "touch_model.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct model_file *m = NULL;
    struct err e = {0};
    if (model_file_open_bytes(data, size, "input", &m, &e) != RC_OK) {
        if (m || e.rc == RC_OK || !e.code[0] || !e.text[0]) abort();
        return 0;
    }
    touch_model(m);
    model_file_close(m);
    return 0;
}
