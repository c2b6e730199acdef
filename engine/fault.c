/* fault: reads the test option --fault RANK:KIND@STEP. */
#include "engine.h"

#include <string.h>

static const char *const fault_names[] = {
    [FAULT_EXIT] = "exit",   [FAULT_KILL] = "kill",   [FAULT_STOP] = "stop", [FAULT_HANG] = "hang",
    [FAULT_TOKEN] = "token", [FAULT_STATE] = "state", [FAULT_PLAN] = "plan",
};

static bool kind_parse(const char *text, size_t n, enum fault_kind *out)
{
    for (size_t i = FAULT_NONE + 1; i < sizeof fault_names / sizeof fault_names[0]; i++) {
        if (strlen(fault_names[i]) != n || memcmp(text, fault_names[i], n) != 0) continue;
        *out = (enum fault_kind)i;
        return true;
    }
    return false;
}

/* All of `text` as a decimal number >= 1. */
static bool step_parse(const char *text, uint64_t *out)
{
    uint64_t value = 0;
    if (!*text) return false;
    for (; *text; text++) {
        if (*text < '0' || *text > '9') return false;
        if (__builtin_mul_overflow(value, 10, &value) || __builtin_add_overflow(value, (uint64_t)(*text - '0'), &value))
            return false;
    }
    *out = value;
    return value > 0;
}

enum rc fault_parse(const char *text, struct fault *out, struct err *e)
{
    struct fault f = {0};
    const char *at = strchr(text, '@');
    bool ok = at && text[0] >= '0' && text[0] < '0' + MAX_RANKS && text[1] == ':' &&
              kind_parse(text + 2, (size_t)(at - text) - 2, &f.kind) && step_parse(at + 1, &f.step);
    if (!ok) {
        return err_set(
            e, RC_BAD_INPUT, EXIT_USAGE, "bad_fault",
            "a fault is RANK:KIND@STEP with rank 0 to %d, kind exit, kill, stop, hang, token, state or plan, and "
            "step 1 or later",
            MAX_RANKS - 1);
    }
    f.rank = text[0] - '0';
    *out = f;
    return RC_OK;
}
