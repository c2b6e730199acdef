/* run_report: a JSON tree in the order of the schema, dumped compactly. Paths and messages may hold any bytes: what is not
 * UTF-8 is repaired, since a summary must not fail over a file's name. No reals: their text would depend on the library. */
#include "run_report.h"

#include <jansson.h>
#include <string.h>

#include "text_check.h"

static json_t *text_or_null(const char *text)
{
    struct buf b = {0};
    json_t *value = NULL;
    if (!text) return json_null();
    if (text_append_repaired(&b, text, strlen(text))) value = json_stringn(b.len ? b.data : "", b.len);
    buf_free(&b);
    return value;
}

static json_t *error_of(const struct err *e)
{
    char text[1100];
    if (!e || !e->code[0]) return json_null();
    return json_pack("{s:o,s:o}", "code", text_or_null(e->code), "message", text_or_null(err_format(e, text, sizeof text)));
}

static json_t *audit_of(const struct run_report *r)
{
    if (!r->audit_asked) return json_null();
    return json_pack("{s:I,s:I,s:I}", "computed", (json_int_t)r->audited, "different", (json_int_t)r->audit_different, "skipped",
                     (json_int_t)r->audit_skipped);
}

static int append_piece(const char *bytes, size_t len, void *out) { return buf_append(out, bytes, len) ? 0 : -1; }

bool run_report_json(const struct run_report *r, struct buf *out)
{
    size_t before = out->len;
    json_t *root = json_pack(
        "{s:I,s:I,s:I,s:I,s:s,s:i,s:I,s:I,s:I,s:I,s:o,s:o,s:o,s:o}", "jobs", (json_int_t)r->jobs, "done", (json_int_t)r->done,
        "failed", (json_int_t)r->failed, "pending", (json_int_t)(r->jobs - r->done - r->failed), "end", r->end, "exit_status",
        r->exit_status, "tokens", (json_int_t)r->tokens, "cached_tokens", (json_int_t)r->cached_tokens, "rank_restarts",
        (json_int_t)r->rank_restarts, "wall_us", (json_int_t)r->wall_us, "audit", audit_of(r), "archive", text_or_null(r->archive), "state",
        text_or_null(r->state), "error", error_of(r->error));
    bool good = root && !json_dump_callback(root, append_piece, out, JSON_COMPACT) && buf_append_str(out, "\n");
    json_decref(root);
    if (!good && out->data) out->data[out->len = before] = '\0';
    return good;
}
