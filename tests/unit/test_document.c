/* Documents: what a path may reach, what a file may hold, and that a pinned digest holds. */
#define _GNU_SOURCE
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "document.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

/* BASE/secret.txt lies outside, BASE/root is the root. */
struct place {
    char base[64], root[80];
    struct document_root *r;
};

static void write_file(const struct place *p, const char *name, const void *bytes, size_t len)
{
    char path[200];
    snprintf(path, sizeof path, "%s/%s", p->base, name);
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC, 0600);
    assert_true(fd >= 0);
    assert_true(fd_write_all(fd, bytes, len));
    close(fd);
}

static void link_to(const struct place *p, const char *target, const char *name)
{
    char path[200];
    snprintf(path, sizeof path, "%s/%s", p->base, name);
    assert_int_equal(symlink(target, path), 0);
}

static int setup(void **state)
{
    struct place *p = calloc(1, sizeof *p);
    assert_non_null(p);
    char folder[120];
    strcpy(p->base, "/tmp/tandem-document-XXXXXX");
    assert_non_null(mkdtemp(p->base));
    snprintf(p->root, sizeof p->root, "%s/root", p->base);
    assert_int_equal(mkdir(p->root, 0700), 0);
    snprintf(folder, sizeof folder, "%s/sub", p->root);
    assert_int_equal(mkdir(folder, 0700), 0);
    write_file(p, "secret.txt", "secret", 6);
    write_file(p, "root/a.txt", "abc", 3);
    write_file(p, "root/sub/b.txt", "line\r\n\xE2\x82\xAC\n", 10);
    assert_int_equal(document_root_open(p->root, &p->r, NULL), RC_OK);
    *state = p;
    return 0;
}

static int teardown(void **state)
{
    struct place *p = *state;
    char command[128];
    document_root_close(p->r);
    snprintf(command, sizeof command, "rm -rf '%s'", p->base);
    int rc = system(command);
    free(p);
    return rc;
}

static void expect_text(const struct place *p, const char *path, const char *want)
{
    struct buf text = {0};
    struct job_fault fault = {0};
    unsigned char digest[DIGEST_BYTES];
    buf_append_str(&text, "before:");
    if (!document_read(p->r, path, &text, digest, &fault)) fail_msg("%s: %s", path, fault.code);
    assert_int_equal(text.len, 7 + strlen(want));
    assert_memory_equal(text.data, "before:", 7);
    assert_string_equal(text.data + 7, want);
    assert_int_equal(fault.status, 0);
    buf_free(&text);
}

static void expect_refused(const struct place *p, const char *path, const char *code)
{
    struct buf text = {0};
    struct job_fault fault = {0};
    unsigned char digest[DIGEST_BYTES];
    buf_append_str(&text, "before");
    if (document_read(p->r, path, &text, digest, &fault)) fail_msg("%s was read", path);
    if (strcmp(fault.code, code)) fail_msg("%s: %s, not %s", path, fault.code, code);
    assert_int_equal(fault.status, 422);
    assert_string_equal(text.data, "before");
    assert_int_equal(text.len, 6);
    buf_free(&text);
}

static void test_reads(void **state)
{
    struct place *p = *state;
    expect_text(p, "a.txt", "abc");
    expect_text(p, "./sub/../a.txt", "abc");
    expect_text(p, "sub/b.txt", "line\r\n\xE2\x82\xAC\n");
    write_file(p, "root/empty", "", 0);
    expect_text(p, "empty", "");
    link_to(p, "sub/b.txt", "root/inside");
    link_to(p, "../a.txt", "root/sub/up");
    expect_text(p, "inside", "line\r\n\xE2\x82\xAC\n");
    expect_text(p, "sub/up", "abc");
}

static void test_outside(void **state)
{
    struct place *p = *state;
    char absolute[120];
    expect_refused(p, "../secret.txt", "document_outside_root");
    expect_refused(p, "sub/../../secret.txt", "document_outside_root");
    expect_refused(p, "..", "document_outside_root");
    expect_refused(p, "/etc/passwd", "document_outside_root");
    snprintf(absolute, sizeof absolute, "%s/a.txt", p->root); /* inside, but not said relative to the root */
    expect_refused(p, absolute, "document_outside_root");
    link_to(p, "../secret.txt", "root/escape");
    link_to(p, "/etc/passwd", "root/away");
    link_to(p, "..", "root/parent");
    link_to(p, "round", "root/round");
    expect_refused(p, "escape", "document_outside_root");
    expect_refused(p, "away", "document_outside_root");
    expect_refused(p, "parent/secret.txt", "document_outside_root");
    expect_refused(p, "round", "document_outside_root");
}

static void test_not_there(void **state)
{
    struct place *p = *state;
    char name[400];
    expect_refused(p, "none.txt", "document_not_found");
    expect_refused(p, "a.txt/b", "document_not_found");
    expect_refused(p, "", "document_not_found");
    memset(name, 'n', sizeof name - 1);
    name[sizeof name - 1] = '\0';
    expect_refused(p, name, "document_not_found");
    link_to(p, "nothing", "root/dangling");
    expect_refused(p, "dangling", "document_not_found");
}

static void test_not_regular(void **state)
{
    struct place *p = *state;
    char path[120];
    snprintf(path, sizeof path, "%s/fifo", p->root);
    assert_int_equal(mkfifo(path, 0600), 0);
    expect_refused(p, "fifo", "document_not_regular"); /* and does not wait for a writer */
    expect_refused(p, "sub", "document_not_regular");
    expect_refused(p, ".", "document_not_regular");
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    snprintf(address.sun_path, sizeof address.sun_path, "%s/socket", p->root);
    int fd = socket(AF_UNIX, SOCK_STREAM, 0);
    assert_int_equal(bind(fd, (struct sockaddr *)&address, sizeof address), 0);
    expect_refused(p, "socket", "document_not_regular");
    close(fd);
}

static void test_not_readable(void **state)
{
    struct place *p = *state;
    if (geteuid() == 0) skip(); /* root may read everything */
    write_file(p, "root/closed", "x", 1);
    char path[120];
    snprintf(path, sizeof path, "%s/closed", p->root);
    assert_int_equal(chmod(path, 0), 0);
    expect_refused(p, "closed", "document_not_readable");
}

static void test_content(void **state)
{
    struct place *p = *state;
    static const char *const broken[] = {
        "\xFF",         "a\x80",   "\xC0\xAF",         "\xE2\x82",         "\xED\xA0\x80",
        "\xE0\x80\x80", "ok\xC3(", "\xF5\x80\x80\x80", "\xF4\x90\x80\x80", "\xF0\x80\x80\x80"};
    for (size_t i = 0; i < sizeof broken / sizeof *broken; i++) {
        write_file(p, "root/broken", broken[i], strlen(broken[i]));
        expect_refused(p, "broken", "document_not_utf8");
    }
    write_file(p, "root/nul", "a\0b", 3);
    expect_refused(p, "nul", "document_not_text");
    static const char fine[] = "\xEE\x80\x80\xF4\x8F\xBF\xBF\xED\x9F\xBF\xF0\x90\x80\x80\xC2\x80";
    write_file(p, "root/fine", fine, sizeof fine - 1);
    expect_text(p, "fine", fine);
    write_file(p, "root/mark", "\xEF\xBB\xBFx\xEF\xBB\xBF", 7);
    expect_text(p, "mark", "x\xEF\xBB\xBF");
}

static void test_size(void **state)
{
    struct place *p = *state;
    char path[120];
    snprintf(path, sizeof path, "%s/large", p->root);
    write_file(p, "root/large", "x", 1);
    assert_int_equal(truncate(path, DOCUMENT_MAX_BYTES + 1L), 0);
    expect_refused(p, "large", "document_too_large");
    assert_int_equal(truncate(path, DOCUMENT_MAX_BYTES), 0);
    expect_refused(p, "large", "document_not_text"); /* its zeros: the size alone would have been fine */
}

static void test_digest(void **state)
{
    struct place *p = *state;
    /* SHA-256 of "abc", FIPS 180-4 example */
    static const unsigned char abc[DIGEST_BYTES] = {0xba, 0x78, 0x16, 0xbf, 0x8f, 0x01, 0xcf, 0xea, 0x41, 0x41, 0x40,
                                                    0xde, 0x5d, 0xae, 0x22, 0x23, 0xb0, 0x03, 0x61, 0xa3, 0x96, 0x17,
                                                    0x7a, 0x9c, 0xb4, 0x10, 0xff, 0x61, 0xf2, 0x00, 0x15, 0xad};
    struct buf text = {0};
    struct job_fault fault = {0};
    unsigned char digest[DIGEST_BYTES], marked[DIGEST_BYTES];
    assert_true(document_read(p->r, "a.txt", &text, digest, &fault));
    assert_memory_equal(digest, abc, DIGEST_BYTES);
    write_file(p, "root/mark",
               "\xEF\xBB\xBF"
               "abc",
               6);
    assert_true(document_read(p->r, "mark", &text, marked, &fault));
    assert_string_equal(text.data, "abcabc");
    assert_memory_not_equal(marked, abc, DIGEST_BYTES); /* over the bytes, mark included */
    buf_free(&text);
}

static void parse(const char *content, struct job_spec *s)
{
    char line[600];
    snprintf(line, sizeof line,
             "{\"custom_id\":\"a\",\"method\":\"POST\",\"url\":\"/v1/chat/completions\",\"body\":{\"messages\":["
             "{\"role\":\"system\",\"content\":\"be brief\"},{\"role\":\"user\",\"content\":%s}]}}",
             content);
    assert_int_equal(job_spec_parse(line, strlen(line), "j", 1, 0, s, NULL), RC_OK);
    assert_int_equal(s->fault.status, 0);
}

#define TWO_DOCUMENTS                                                                                                  \
    "[{\"type\":\"text\",\"text\":\"read\"},{\"type\":\"document\",\"path\":\"a.txt\"},"                               \
    "{\"type\":\"document\",\"path\":\"sub/b.txt\"},{\"type\":\"text\",\"text\":\"\"}]"

static void test_texts(void **state)
{
    struct place *p = *state;
    struct job_spec s;
    struct job_texts texts;
    struct job_fault fault = {0};
    parse(TWO_DOCUMENTS, &s);
    assert_true(job_texts_read(p->r, &s, NULL, 0, &texts, &fault));
    assert_int_equal(texts.n, 2);
    assert_string_equal(texts.messages[0].role, "system");
    assert_string_equal(texts.messages[0].text.data, "be brief");
    assert_string_equal(texts.messages[1].role, "user");
    assert_string_equal(texts.messages[1].text.data, "read\nabc\nline\r\n\xE2\x82\xAC\n\n");
    job_texts_free(&texts);
    job_spec_free(&s);
    parse("\"\"", &s);
    assert_true(job_texts_read(p->r, &s, NULL, 0, &texts, &fault));
    assert_int_equal(texts.messages[1].text.len, 0);
    assert_string_equal(texts.messages[1].text.data, "");
    job_texts_free(&texts);
    job_spec_free(&s);
}

static void expect_changed(const struct place *p, const struct job_spec *s, const struct buf *pins, size_t n)
{
    struct job_texts texts;
    struct job_fault fault = {0};
    assert_false(job_texts_read(p->r, s, pins->data, n, &texts, &fault));
    assert_int_equal(fault.status, 422);
    assert_string_equal(fault.code, "document_changed");
    assert_int_equal(texts.n, 0);
    assert_null(texts.messages);
}

static void test_pinned(void **state)
{
    struct place *p = *state;
    struct job_spec s;
    struct job_texts texts;
    struct job_fault fault = {0};
    struct buf pins = {0};
    parse(TWO_DOCUMENTS, &s);
    assert_true(document_digests(p->r, &s, &pins, &fault));
    assert_int_equal(pins.len, 2 * DIGEST_BYTES);
    assert_true(job_texts_read(p->r, &s, pins.data, pins.len, &texts, &fault));
    job_texts_free(&texts);
    expect_changed(p, &s, &pins, DIGEST_BYTES); /* one pin for two documents */
    write_file(p, "root/sub/b.txt", "other", 5);
    expect_changed(p, &s, &pins, pins.len);
    job_spec_free(&s);
    buf_free(&pins);
}

static void test_digests_of_missing(void **state)
{
    struct place *p = *state;
    struct job_spec s;
    struct job_fault fault = {0};
    struct buf pins = {0};
    parse("[{\"type\":\"document\",\"path\":\"a.txt\"},{\"type\":\"document\",\"path\":\"gone\"}]", &s);
    assert_false(document_digests(p->r, &s, &pins, &fault));
    assert_string_equal(fault.code, "document_not_found");
    assert_non_null(strstr(fault.message, "'gone'"));
    job_spec_free(&s);
    buf_free(&pins);
}

/* A short line that names one large file many times must not fill the memory. */
static void test_total(void **state)
{
    struct place *p = *state;
    enum { BYTES = 60 << 20 };
    char *large = malloc(BYTES);
    assert_non_null(large);
    memset(large, 'x', BYTES);
    write_file(p, "root/large", large, BYTES);
    free(large);
    struct job_spec s;
    struct job_texts texts;
    struct job_fault fault = {0};
    parse("[{\"type\":\"document\",\"path\":\"large\"},{\"type\":\"document\",\"path\":\"large\"},"
          "{\"type\":\"document\",\"path\":\"large\"},{\"type\":\"document\",\"path\":\"large\"},"
          "{\"type\":\"document\",\"path\":\"large\"}]",
          &s);
    assert_false(job_texts_read(p->r, &s, NULL, 0, &texts, &fault));
    assert_int_equal(fault.status, 413);
    assert_string_equal(fault.code, "job_too_large");
    job_spec_free(&s);
}

static void test_root(void **state)
{
    struct place *p = *state;
    char path[120];
    struct document_root *r;
    struct err e = {0};
    snprintf(path, sizeof path, "%s/a.txt", p->root);
    assert_int_equal(document_root_open(path, &r, &e), RC_BAD_INPUT);
    assert_int_equal(e.exit_status, EXIT_NO_INPUT);
    assert_null(r);
    e = (struct err){0};
    assert_int_equal(document_root_open("/nonexistent/folder", &r, &e), RC_BAD_INPUT);
    assert_int_equal(e.exit_status, EXIT_NO_INPUT);
    document_root_close(NULL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_reads, setup, teardown),
        cmocka_unit_test_setup_teardown(test_outside, setup, teardown),
        cmocka_unit_test_setup_teardown(test_not_there, setup, teardown),
        cmocka_unit_test_setup_teardown(test_not_regular, setup, teardown),
        cmocka_unit_test_setup_teardown(test_not_readable, setup, teardown),
        cmocka_unit_test_setup_teardown(test_content, setup, teardown),
        cmocka_unit_test_setup_teardown(test_size, setup, teardown),
        cmocka_unit_test_setup_teardown(test_digest, setup, teardown),
        cmocka_unit_test_setup_teardown(test_texts, setup, teardown),
        cmocka_unit_test_setup_teardown(test_pinned, setup, teardown),
        cmocka_unit_test_setup_teardown(test_digests_of_missing, setup, teardown),
        cmocka_unit_test_setup_teardown(test_total, setup, teardown),
        cmocka_unit_test_setup_teardown(test_root, setup, teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
