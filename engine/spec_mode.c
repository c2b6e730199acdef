/* spec_mode: the names of where drafts come from, for both sides of the command line. */
#include <string.h>

#include "engine.h"

static const char *const spec_names[SPEC_MODES] = {"auto", "mtp", "ngram", "off"};

const char *spec_mode_name(enum spec_mode m) { return spec_names[m]; }

bool spec_mode_parse(const char *name, enum spec_mode *out)
{
    for (int m = 0; m < SPEC_MODES; m++) {
        if (strcmp(name, spec_names[m]) != 0) continue;
        *out = (enum spec_mode)m;
        return true;
    }
    return false;
}
