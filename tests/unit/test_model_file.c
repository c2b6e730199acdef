/* model_file: opening real files, and the digest with its cache beside the model. The digest expected is that of
 * sha256sum on the same 24 bytes. */
#define _GNU_SOURCE
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "model_file.h"

static const char empty_model[24] = "GGUF\3";
#define EMPTY_SHA256 "a4e5e156ddec27e286f75328784d7106b60a4eb1d246e950a001a3f944fbda99"

struct place {
    char folder[64];
    char model[128];
    char cache[128];
};

static struct place make_place(void)
{
    struct place p = {.folder = "/tmp/tandem-model-XXXXXX"};
    assert_non_null(mkdtemp(p.folder));
    snprintf(p.model, sizeof p.model, "%s/m.gguf", p.folder);
    snprintf(p.cache, sizeof p.cache, "%s/.m.gguf.tandem-digest", p.folder);
    return p;
}

static void remove_place(const struct place *p)
{
    unlink(p->cache);
    unlink(p->model);
    assert_int_equal(rmdir(p->folder), 0); /* nothing else was left behind */
}

static void write_file(const char *path, const void *bytes, size_t n)
{
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    assert_true(fd >= 0);
    assert_true(fd_write_all(fd, bytes, n));
    close(fd);
}

/* A time of change that lies back far enough for the cache. */
static void set_age(const char *path, time_t seconds)
{
    struct timespec t[2] = {{.tv_nsec = UTIME_OMIT}, {.tv_sec = time(NULL) - seconds}};
    assert_int_equal(utimensat(AT_FDCWD, path, t, 0), 0);
}

static void digest_of(const char *path, char hex[65])
{
    struct model_file *m;
    assert_int_equal(model_file_open(path, &m, NULL), RC_OK);
    assert_int_equal(model_file_digest(m, hex, NULL), RC_OK);
    model_file_close(m);
}

static void refuses(const char *path, int exit_status, const char *code)
{
    struct model_file *m = NULL;
    struct err e = {0};
    assert_int_not_equal(model_file_open(path, &m, &e), RC_OK);
    assert_null(m);
    assert_int_equal(e.exit_status, exit_status);
    assert_string_equal(e.code, code);
    assert_non_null(strstr(e.source[0] ? e.source : e.text, path));
}

static void opens_files_only(void **state)
{
    (void)state;
    struct place p = make_place();
    refuses(p.model, EXIT_NO_INPUT, "cannot_open");
    refuses(p.folder, EXIT_NO_INPUT, "not_a_file");
    assert_int_equal(mkfifo(p.model, 0600), 0);
    refuses(p.model, EXIT_NO_INPUT, "not_a_file"); /* at once, without a writer */
    unlink(p.model);
    write_file(p.model, "", 0);
    refuses(p.model, EXIT_UNAVAILABLE, "gguf_truncated");
    write_file(p.model, "{\"a\": 1} and some more", 22);
    refuses(p.model, EXIT_UNAVAILABLE, "gguf_bad_magic");
    write_file(p.model, empty_model, sizeof empty_model);
    struct model_file *m = NULL;
    assert_int_equal(model_file_open(p.model, &m, NULL), RC_OK);
    assert_string_equal(model_file_path(m), p.model);
    model_file_close(m);
    model_file_close(NULL);
    remove_place(&p);
}

static void digests_bytes(void **state)
{
    (void)state;
    struct model_file *m;
    char hex[65];
    assert_int_equal(model_file_open_bytes(empty_model, sizeof empty_model, "m", &m, NULL), RC_OK);
    assert_int_equal(model_file_digest(m, hex, NULL), RC_OK);
    assert_string_equal(hex, EMPTY_SHA256);
    model_file_close(m);
}

static void reuses_its_cache(void **state)
{
    (void)state;
    struct place p = make_place();
    struct buf text = {0};
    char hex[65];
    write_file(p.model, empty_model, sizeof empty_model);
    set_age(p.model, 3600);
    digest_of(p.model, hex);
    assert_string_equal(hex, EMPTY_SHA256);
    assert_int_equal(file_read(p.cache, 1000, &text, NULL), RC_OK);
    char *stored = strstr(text.data, EMPTY_SHA256);
    assert_non_null(stored);
    stored[0] = stored[0] == '0' ? '1' : '0'; /* a digest that only the cache can give */
    write_file(p.cache, text.data, text.len);
    digest_of(p.model, hex);
    assert_int_equal(hex[0], stored[0]);
    assert_string_equal(hex + 1, &EMPTY_SHA256[1]);
    set_age(p.model, 7200); /* another time of change: made anew */
    digest_of(p.model, hex);
    assert_string_equal(hex, EMPTY_SHA256);
    buf_free(&text);
    remove_place(&p);
}

static void distrusts_a_damaged_cache(void **state)
{
    (void)state;
    struct place p = make_place();
    struct buf text = {0};
    char hex[65];
    write_file(p.model, empty_model, sizeof empty_model);
    set_age(p.model, 3600);
    digest_of(p.model, hex);
    assert_int_equal(file_read(p.cache, 1000, &text, NULL), RC_OK);
    char *stored = strstr(text.data, EMPTY_SHA256);
    stored[5] = stored[5] == '0' ? '1' : '0';
    for (size_t n = 0; n < text.len; n++) { /* cut short anywhere */
        write_file(p.cache, text.data, n);
        digest_of(p.model, hex);
        assert_string_equal(hex, EMPTY_SHA256);
    }
    buf_append(&text, "more\n", 5); /* longer than it may be */
    stored = strstr(text.data, "sha256 ") + 7;
    write_file(p.cache, text.data, text.len);
    digest_of(p.model, hex);
    assert_string_equal(hex, EMPTY_SHA256);
    text.len -= 5;
    stored[5] = 'G'; /* no hexadecimal digit */
    write_file(p.cache, text.data, text.len);
    digest_of(p.model, hex);
    assert_string_equal(hex, EMPTY_SHA256);
    unlink(p.cache);
    assert_int_equal(mkdir(p.cache, 0700), 0); /* can neither be read nor replaced */
    digest_of(p.model, hex);
    assert_string_equal(hex, EMPTY_SHA256);
    rmdir(p.cache);
    buf_free(&text);
    remove_place(&p);
}

/* A second change could still leave the same time. */
static void does_not_cache_a_fresh_file(void **state)
{
    (void)state;
    struct place p = make_place();
    char hex[65];
    write_file(p.model, empty_model, sizeof empty_model);
    set_age(p.model, -60);
    digest_of(p.model, hex);
    assert_string_equal(hex, EMPTY_SHA256);
    assert_int_not_equal(access(p.cache, F_OK), 0);
    remove_place(&p);
}

static void notices_a_change_in_use(void **state)
{
    (void)state;
    struct place p = make_place();
    struct model_file *m;
    struct err e = {0};
    char hex[65];
    write_file(p.model, empty_model, sizeof empty_model);
    for (int cached = 0; cached < 2; cached++) {
        set_age(p.model, 3600);
        if (cached) digest_of(p.model, hex);
        assert_int_equal(model_file_open(p.model, &m, NULL), RC_OK);
        set_age(p.model, 1800);
        assert_int_equal(model_file_digest(m, hex, &e), RC_FAILED);
        assert_string_equal(e.code, "model_changed");
        assert_int_equal(access(p.cache, F_OK) == 0, cached);
        model_file_close(m);
        e = (struct err){0};
    }
    remove_place(&p);
}

/* The digest is of the file that was opened, though another has its name by now. */
static void stays_with_the_opened_file(void **state)
{
    (void)state;
    struct place p = make_place();
    struct model_file *m;
    char hex[65], other[140];
    snprintf(other, sizeof other, "%s.other", p.model);
    write_file(p.model, empty_model, sizeof empty_model);
    set_age(p.model, 3600);
    assert_int_equal(model_file_open(p.model, &m, NULL), RC_OK);
    write_file(other, "GGUF", 4);
    assert_int_equal(rename(other, p.model), 0);
    assert_int_equal(model_file_digest(m, hex, NULL), RC_OK);
    assert_string_equal(hex, EMPTY_SHA256);
    model_file_close(m);
    remove_place(&p);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(opens_files_only),
        cmocka_unit_test(digests_bytes),
        cmocka_unit_test(reuses_its_cache),
        cmocka_unit_test(distrusts_a_damaged_cache),
        cmocka_unit_test(does_not_cache_a_fresh_file),
        cmocka_unit_test(notices_a_change_in_use),
        cmocka_unit_test(stays_with_the_opened_file),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
