/* fuzz_job_line: bytes as a job file: read line by line under two limits, every line parsed, every job's fault made a
 * record.
 *
 * Checked beside memory errors: line numbers and offsets ascend and stay inside the file, no line beyond the limit
 * comes out, a parsed job holds together, a body's canonical form parses to itself, and a record is one line that
 * parses again. */
#define _GNU_SOURCE
#include "job_line.h"
#include "job_result.h"
#include "job_spec.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void must(bool holds)
{
    if (!holds) abort();
}

static const unsigned char key[32] = {1, 2, 3};

static void check_record(enum rc rc, const struct buf *record)
{
    must(rc == RC_OK);
    must(record->len > 2 && record->data[0] == '{' && record->data[record->len - 1] == '}');
    must(!memchr(record->data, '\n', record->len) && !memchr(record->data, 0, record->len));
}

static void check_records(const struct job_spec *s)
{
    struct buf record = {0};
    if (s->fault.status) check_record(job_result_failure(key, s->custom_id, &s->fault, &record, NULL), &record);
    buf_clear(&record);
    const struct job_answer a = {
        .text = "x", .text_len = 1, .finish_reason = "stop", .model = s->model ? s->model : "m"};
    check_record(job_result_success(key, s, &a, &record, NULL), &record);
    buf_clear(&record);
    check_record(job_result_timing(s->custom_id, 200, &(struct job_timing){0}, &record, NULL), &record);
    buf_free(&record);
}

/* A job made of the canonical body must have that canonical body and the same fault. */
static void check_canonical(const struct job_spec *s)
{
    struct buf line = {0};
    struct job_spec again;
    struct err e = {0};
    buf_printf(&line, "{\"custom_id\":\"x\",\"method\":\"POST\",\"url\":\"/v1/%s\",\"body\":",
               s->endpoint == JOB_CHAT ? "chat/completions" : "completions");
    buf_append_str(&line, s->canonical_body);
    if (s->canonical_tandem) buf_printf(&line, ",\"tandem\":%s", s->canonical_tandem);
    buf_append_str(&line, "}");
    must(!line.failed);
    must(job_spec_parse(line.data, line.len, NULL, 1, 0, &again, &e) == RC_OK);
    must(!strcmp(s->canonical_body, again.canonical_body) && s->timeout_us == again.timeout_us);
    must(!s->canonical_tandem == !again.canonical_tandem);
    if (s->canonical_tandem) must(!strcmp(s->canonical_tandem, again.canonical_tandem));
    must(!strcmp(s->fault.code, again.fault.code) && !strcmp(s->fault.param, again.fault.param));
    job_spec_free(&again);
    buf_free(&line);
}

static void check_spec(const struct job_spec *s)
{
    must(s->custom_id && *s->custom_id && strlen(s->custom_id) <= 512 && s->canonical_body);
    if (s->fault.status) {
        must(s->fault.status == 400 && s->fault.code[0] && s->fault.message[0]);
        return;
    }
    must(s->n_messages > 0 && s->n_stop <= 16 && s->max_tokens >= 0);
    for (size_t i = 0; i < s->n_messages; i++) {
        must(s->messages[i].role[0] && s->messages[i].n_parts > 0);
        for (size_t j = 0; j < s->messages[i].n_parts; j++) {
            const struct job_part *p = &s->messages[i].parts[j];
            must(!p->text != !p->document_path);
            if (p->text) must(strlen(p->text) == p->text_len);
        }
    }
}

static void parse_line(const struct job_line *line)
{
    struct job_spec s;
    struct err e = {0};
    static const char *const names[] = {"m"};
    /* memory of exactly the line's size, so that reading past it shows */
    char *exact = malloc(line->len ? line->len : 1);
    must(exact != NULL);
    memcpy(exact, line->bytes, line->len);
    enum rc rc = job_spec_parse(exact, line->len, "f", line->number, line->byte, &s, &e);
    free(exact);
    must(rc == RC_OK || (rc == RC_BAD_INPUT && e.exit_status == EXIT_JOB_FILE && e.line == line->number && e.text[0]));
    if (rc != RC_OK) return;
    check_spec(&s);
    check_canonical(&s);
    job_spec_check_model(&s, names, 1);
    check_records(&s);
    job_spec_free(&s);
}

static void read_file(const char *path, size_t size, size_t limit, bool parse)
{
    struct job_reader *r;
    struct job_line line;
    int64_t number = 0, byte = -1;
    enum rc rc;
    must(job_reader_open(path, limit, &r, NULL) == RC_OK);
    while ((rc = job_reader_next(r, &line, NULL)) == RC_OK) {
        must(line.number > number && line.byte > byte && line.byte < (int64_t)size);
        must(line.len <= limit && line.byte + (int64_t)line.len <= (int64_t)size);
        number = line.number;
        byte = line.byte;
        if (parse && !line.too_long) parse_line(&line);
    }
    must(rc == RC_RETRY);
    job_reader_close(r);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    char path[64];
    int fd = memfd_create("jobs", MFD_CLOEXEC);
    must(fd >= 0 && fd_write_all(fd, data, size));
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    read_file(path, size, 1 << 20, true);
    read_file(path, size, 16, false);
    close(fd);
    return 0;
}
