/* model_file: opening real files and folders, and the digest with its cache beside the model. The digest expected of a
 * GGUF file is that of sha256sum on the same 24 bytes; that of a folder is put together here from its parts. */
#define _GNU_SOURCE
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include <fcntl.h>
#include <nettle/sha2.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "model_file.h"
#include "safetensors_build.h"

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
    refuses(p.folder, EXIT_NO_INPUT, "not_a_model");
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

/* A folder with a model in it, made of what the test puts there. */
struct folder {
    char path[64];
    char files[16][128];
    size_t n;
};

static struct folder make_folder(void)
{
    struct folder f = {.path = "/tmp/tandem-folder-XXXXXX"};
    assert_non_null(mkdtemp(f.path));
    return f;
}

static const char *put(struct folder *f, const char *name, const void *bytes, size_t n)
{
    char path[128];
    snprintf(path, sizeof path, "%s/%s", f->path, name);
    write_file(path, bytes, n);
    set_age(path, 3600);
    return strcpy(f->files[f->n++], path);
}

static const char *put_json(struct folder *f, const char *name, const char *text)
{
    return put(f, name, text, strlen(text));
}

/* A file of weights with one F32 tensor of n numbers for each name. */
static const char *put_weights(struct folder *f, const char *file, const char *const *names, uint64_t n)
{
    struct safetensors_build s = {0};
    struct buf bytes = {0};
    for (; *names; names++) add_1d(&s, *names, "F32", n);
    build_safetensors(&s, &bytes);
    const char *path = put(f, file, bytes.data, bytes.len);
    buf_free(&bytes);
    return path;
}

static void remove_folder(struct folder *f)
{
    for (size_t i = 0; i < f->n; i++) {
        char cache[256];
        const char *name = strrchr(f->files[i], '/') + 1;
        unlink(f->files[i]);
        snprintf(cache, sizeof cache, "%s/.%s.tandem-digest", f->path, name);
        unlink(cache);
    }
    assert_int_equal(rmdir(f->path), 0);
}

static void has_tensors(const char *path, const char *const *names)
{
    struct model_file *m = NULL;
    struct err e = {0};
    char text[1200];
    if (model_file_open(path, &m, &e) != RC_OK) fail_msg("%s", err_format(&e, text, sizeof text));
    for (size_t i = 0; names[i]; i++) assert_string_equal(model_file_tensor_at(m, i)->name, names[i]);
    for (size_t i = 0; names[i]; i++) assert_null(names[i + 1] ? NULL : model_file_tensor_at(m, i + 1));
    assert_string_equal(model_file_path(m), path);
    assert_int_equal(model_file_layout(m), MODEL_LAYOUT_HF);
    model_file_close(m);
}

#define NAMES(...) ((const char *const[]){__VA_ARGS__, NULL})

static void opens_a_folder_by_any_of_its_names(void **state)
{
    (void)state;
    struct folder f = make_folder();
    char path[200];
    put_json(&f, "config.json", "{}");
    put_weights(&f, "model.safetensors", NAMES("b", "a"), 3);
    has_tensors(f.path, NAMES("b", "a"));
    snprintf(path, sizeof path, "%s///", f.path);
    has_tensors(path, NAMES("b", "a"));
    snprintf(path, sizeof path, "%s/config.json", f.path);
    has_tensors(path, NAMES("b", "a"));
    snprintf(path, sizeof path, "%s/model.safetensors", f.path);
    has_tensors(path, NAMES("b", "a"));
    put_weights(&f, "other.safetensors", NAMES("c"), 3); /* beside it, and only by name */
    has_tensors(f.path, NAMES("b", "a"));
    snprintf(path, sizeof path, "%s/other.safetensors", f.path);
    has_tensors(path, NAMES("c"));
    char *before = getcwd(NULL, 0);
    assert_non_null(before);
    assert_int_equal(chdir(f.path), 0);
    has_tensors("config.json", NAMES("b", "a"));
    has_tensors(".", NAMES("b", "a"));
    assert_int_equal(chdir(before), 0);
    free(before);
    remove_folder(&f);
}

#define INDEX "model.safetensors.index.json"
#define FIRST "model-00001-of-00002.safetensors"
#define SECOND "model-00002-of-00002.safetensors"

static void opens_shards(void **state)
{
    (void)state;
    struct folder f = make_folder();
    char path[200];
    put_json(&f, "config.json", "{}");
    put_json(&f, INDEX, "{\"metadata\":{\"total_size\":36},\"weight_map\":{\"c\":\"" SECOND "\",\"a\":\"" FIRST
                        "\",\"b\":\"" FIRST "\"}}");
    put_weights(&f, SECOND, NAMES("c"), 3);
    put_weights(&f, FIRST, NAMES("b", "a"), 3);
    has_tensors(f.path, NAMES("b", "a", "c"));
    snprintf(path, sizeof path, "%s/%s", f.path, INDEX);
    has_tensors(path, NAMES("b", "a", "c"));
    snprintf(path, sizeof path, "%s/%s", f.path, SECOND); /* one of them stands for all */
    has_tensors(path, NAMES("b", "a", "c"));
    put_weights(&f, "mtp.safetensors", NAMES("d"), 3); /* not in the index: for itself */
    has_tensors(f.path, NAMES("b", "a", "c"));
    snprintf(path, sizeof path, "%s/mtp.safetensors", f.path);
    has_tensors(path, NAMES("d"));
    put_weights(&f, "model.safetensors", NAMES("whole"), 3); /* goes before an index */
    has_tensors(f.path, NAMES("whole"));
    remove_folder(&f);
}

/* The error of the folder, whole, with the name of its file. */
static void folder_fails(const struct folder *f, const char *file, int exit_status, const char *code, const char *text)
{
    struct model_file *m = NULL;
    struct err e = {0};
    char source[200] = "", wanted[700];
    if (file) snprintf(source, sizeof source, "%s/%s", f->path, file);
    snprintf(wanted, sizeof wanted, "%s%s", text, file ? "" : f->path); /* without a file, the text ends in the folder */
    assert_int_not_equal(model_file_open(f->path, &m, &e), RC_OK);
    assert_null(m);
    if (strcmp(e.code, code) || strcmp(e.text, wanted) || strcmp(e.source, source))
        fail_msg("%s: %s: %s", e.source, e.code, e.text);
    assert_int_equal(e.exit_status, exit_status);
}

/* One index over a first shard with "a" and "b" and a second with "c". */
static void index_fails(const char *weight_map, const char *file, int exit_status, const char *code, const char *text)
{
    struct folder f = make_folder();
    struct buf index = {0};
    buf_printf(&index, "{\"weight_map\":%s}", weight_map);
    put_json(&f, "config.json", "{}");
    put_json(&f, INDEX, index.data);
    put_weights(&f, FIRST, NAMES("a", "b"), 3);
    put_weights(&f, SECOND, NAMES("c"), 3);
    folder_fails(&f, file, exit_status, code, text);
    buf_free(&index);
    remove_folder(&f);
}

static void refuses_a_wrong_index(void **state)
{
    (void)state;
    static const char bad[] = "weight_map is missing, empty or no object";
    index_fails("{}", INDEX, EXIT_UNAVAILABLE, "index_bad", bad);
    index_fails("[]", INDEX, EXIT_UNAVAILABLE, "index_bad", bad);
    static const char *const names[] = {"../x.safetensors", "/etc/x.safetensors", "sub/x.safetensors",
                                        "..",               ".safetensors",       "model.bin",
                                        ".x.safetensors",   ""};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        char map[100], text[200];
        snprintf(map, sizeof map, "{\"a\":\"%s\"}", names[i]);
        snprintf(text, sizeof text, "the file of tensor a is no plain name of a .safetensors file: %s", names[i]);
        index_fails(map, INDEX, EXIT_UNAVAILABLE, "index_bad_name", text);
    }
    index_fails("{\"a\":1}", INDEX, EXIT_UNAVAILABLE, "index_bad_name",
                "the file of tensor a is no plain name of a .safetensors file: no text");
    index_fails("{\"a\":\"x\\n.safetensors\"}", INDEX, EXIT_UNAVAILABLE, "index_bad_name",
                "the file of tensor a is no plain name of a .safetensors file: x?.safetensors");
    index_fails("{\"a\":\"gone.safetensors\"}", INDEX, EXIT_NO_INPUT, "missing_shard",
                "it names gone.safetensors, which is not in the folder");
    index_fails("{\"a\":\"" FIRST "\"}", FIRST, EXIT_UNAVAILABLE, "index_mismatch", "tensor b is not in " INDEX);
    index_fails("{\"a\":\"" FIRST "\",\"b\":\"" SECOND "\",\"c\":\"" SECOND "\"}", FIRST, EXIT_UNAVAILABLE,
                "index_mismatch", "tensor b is here, but " INDEX " says that it is in " SECOND);
    index_fails("{\"a\":\"" FIRST "\",\"b\":\"" FIRST "\",\"d\":\"" FIRST "\"}", INDEX, EXIT_UNAVAILABLE,
                "index_mismatch", "tensor d is not in " FIRST);
    index_fails("{\"a\":\"" FIRST "\",\"a\":\"" FIRST "\"}", INDEX, EXIT_UNAVAILABLE, "json_duplicate",
                "invalid JSON: a key is given twice");
}

static void refuses_a_damaged_folder(void **state)
{
    (void)state;
    struct folder f = make_folder();
    char path[200], wanted[400];
    struct err e = {0};
    struct model_file *m = NULL;
    const char *config = put_json(&f, "config.json", "{}");
    snprintf(wanted, sizeof wanted, "the folder %s has neither model.safetensors nor %s", f.path, INDEX);
    assert_int_equal(model_file_open(f.path, &m, &e), RC_BAD_INPUT);
    assert_string_equal(e.text, wanted);
    assert_int_equal(e.exit_status, EXIT_NO_INPUT);
    snprintf(path, sizeof path, "%s/x.safetensors", f.path);
    snprintf(wanted, sizeof wanted, "cannot open the model %s: No such file or directory", path);
    e = (struct err){0};
    assert_int_equal(model_file_open(path, &m, &e), RC_BAD_INPUT);
    assert_string_equal(e.text, wanted);
    put_json(&f, INDEX, "{\"weight_map\":{\"a\":\"" FIRST "\",\"b\":\"" SECOND "\"}}");
    const char *index = f.files[f.n - 1], *first = put_weights(&f, FIRST, NAMES("a"), 100);
    put_weights(&f, SECOND, NAMES("b", "a"), 3);
    folder_fails(&f, SECOND, EXIT_UNAVAILABLE, "index_mismatch",
                 "tensor a is here, but " INDEX " says that it is in " FIRST);
    assert_int_equal(truncate(first, 200), 0);
    folder_fails(&f, FIRST, EXIT_UNAVAILABLE, "safetensors_truncated",
                 "tensor a needs the bytes 0 to 400, but the data has only 134");
    assert_int_equal(truncate(first, 0), 0);
    folder_fails(&f, FIRST, EXIT_UNAVAILABLE, "safetensors_truncated",
                 "the length of the header needs 8 bytes, the file has 0");
    write_file(index, "", 0);
    folder_fails(&f, INDEX, EXIT_UNAVAILABLE, "json_invalid", "invalid JSON: the text ends inside a value");
    write_file(index, "[]", 2);
    folder_fails(&f, INDEX, EXIT_UNAVAILABLE, "json_invalid", "invalid JSON: an array, not an object");
    put_json(&f, "tokenizer_config.json", "{\"chat_template\": 5}");
    folder_fails(&f, "tokenizer_config.json", EXIT_UNAVAILABLE, "model_bad_template", "chat_template is no text");
    write_file(f.files[f.n - 1], "{\n 5}", 5);
    e = (struct err){0};
    assert_int_equal(model_file_open(f.path, &m, &e), RC_BAD_INPUT);
    assert_string_equal(e.text, "invalid JSON: not JSON");
    assert_int_equal(e.line, 2);
    assert_int_equal(truncate(config, (4 << 20) + 1), 0);
    snprintf(wanted, sizeof wanted, "%s has 4194305 bytes, more than 4194304", config);
    e = (struct err){0};
    assert_int_equal(model_file_open(f.path, &m, &e), RC_BAD_INPUT);
    assert_string_equal(e.text, wanted);
    assert_int_equal(unlink(config), 0);
    e = (struct err){0};
    assert_int_equal(model_file_open(f.path, &m, &e), RC_BAD_INPUT);
    snprintf(wanted, sizeof wanted, "the folder %s has no config.json", f.path);
    assert_string_equal(e.text, wanted);
    remove_folder(&f);
}

static void text_is(bool there, struct model_text text, const char *expected)
{
    assert_int_equal(there, expected != NULL);
    if (!expected) return;
    assert_int_equal(text.len, strlen(expected));
    assert_memory_equal(text.bytes, expected, text.len);
}

/* The template of a folder with this tokenizer_config.json and this chat_template.jinja (NULL: none). */
static void template_is(const char *tokenizer_config, const char *jinja, const char *expected)
{
    struct folder f = make_folder();
    struct model_file *m;
    struct model_text text = {0};
    put_json(&f, "config.json", "{\"a\": 1}");
    put_weights(&f, "model.safetensors", NAMES("a"), 1);
    if (tokenizer_config) put_json(&f, "tokenizer_config.json", tokenizer_config);
    if (jinja) put_json(&f, "chat_template.jinja", jinja);
    assert_int_equal(model_file_open(f.path, &m, NULL), RC_OK);
    bool there = model_file_chat_template(m, &text);
    text_is(there, text, expected);
    there = model_file_json(m, MODEL_JSON_TOKENIZER_CONFIG, &text);
    text_is(there, text, tokenizer_config);
    there = model_file_json(m, MODEL_JSON_CONFIG, &text);
    text_is(there, text, "{\"a\": 1}");
    assert_false(model_file_json(m, MODEL_JSON_TOKENIZER, &text));
    assert_false(model_file_json(m, MODEL_JSON_GENERATION, &text));
    model_file_close(m);
    remove_folder(&f);
}

static void gives_texts_and_the_template(void **state)
{
    (void)state;
    template_is(NULL, NULL, NULL);
    template_is("{\"bos_token\": null}", NULL, NULL);
    template_is("{\"chat_template\": null}", NULL, NULL);
    template_is("{\"chat_template\": \"\"}", NULL, "");
    template_is("{\"chat_template\": \"{{ x }}\\n\"}", NULL, "{{ x }}\n");
    template_is("{\"chat_template\": \"old\"}", "new\n", "new\n");
    template_is("{\"chat_template\": [{\"name\": \"rag\", \"template\": \"1\"}, {\"name\": \"default\", \"template\": "
                "\"2\"}]}",
                NULL, "2");
    template_is("{\"chat_template\": []}", NULL, NULL);
    assert_string_equal(model_json_name(MODEL_JSON_CONFIG), "config.json");
    assert_string_equal(model_json_name(MODEL_JSON_GENERATION), "generation_config.json");
    assert_string_equal(model_json_name(MODEL_JSON_TOKENIZER), "tokenizer.json");
    assert_string_equal(model_json_name(MODEL_JSON_TOKENIZER_CONFIG), "tokenizer_config.json");
}

static void sha256_hex(const void *bytes, size_t n, char hex[65])
{
    struct sha256_ctx sha;
    uint8_t digest[SHA256_DIGEST_SIZE];
    sha256_init(&sha);
    sha256_update(&sha, n, bytes);
    sha256_digest(&sha, sizeof digest, digest);
    for (size_t i = 0; i < sizeof digest; i++) snprintf(hex + 2 * i, 3, "%02x", digest[i]);
}

static void add_line(struct buf *list, const struct folder *f, const char *name)
{
    struct buf bytes = {0};
    char path[200], hex[65];
    snprintf(path, sizeof path, "%s/%s", f->path, name);
    assert_int_equal(file_read(path, 1 << 20, &bytes, NULL), RC_OK);
    sha256_hex(bytes.data, bytes.len, hex);
    buf_printf(list, "%s %zu %s\n", hex, bytes.len, name);
    buf_free(&bytes);
}

static void digests_all_files_of_a_folder(void **state)
{
    (void)state;
    struct folder f = make_folder();
    struct buf list = {0};
    char expected[65], hex[65], cache[200], other[65];
    const char *config = put_json(&f, "config.json", "{}");
    put_json(&f, "README.md", "not part of the model");
    put_json(&f, "tokenizer.json", "{\"model\": {}}");
    put_json(&f, "tokenizer_config.json", "{}");
    put_json(&f, "generation_config.json", "{ }");
    put_json(&f, "chat_template.jinja", "x");
    put_json(&f, INDEX, "{\"weight_map\":{\"a\":\"" FIRST "\",\"b\":\"" SECOND "\"}}");
    put_weights(&f, SECOND, NAMES("b"), 3);
    put_weights(&f, FIRST, NAMES("a"), 3);
    static const char *const order[] = {"config.json",         "generation_config.json", "tokenizer.json",
                                        "tokenizer_config.json", "chat_template.jinja",    INDEX, FIRST, SECOND};
    buf_append_str(&list, "tandem model folder 1\n");
    for (size_t i = 0; i < sizeof order / sizeof *order; i++) add_line(&list, &f, order[i]);
    sha256_hex(list.data, list.len, expected);
    for (int again = 0; again < 2; again++) {
        digest_of(f.path, hex);
        assert_string_equal(hex, expected);
    }
    snprintf(cache, sizeof cache, "%s/.%s.tandem-digest", f.path, SECOND); /* of shards, not of small files */
    assert_int_equal(access(cache, F_OK), 0);
    snprintf(cache, sizeof cache, "%s/.config.json.tandem-digest", f.path);
    assert_int_not_equal(access(cache, F_OK), 0);
    write_file(config, "{ }", 3); /* every file counts */
    digest_of(f.path, other);
    assert_string_not_equal(other, expected);
    struct model_file *m;
    struct err e = {0};
    assert_int_equal(model_file_open(f.path, &m, NULL), RC_OK);
    set_age(f.files[f.n - 1], 1800);
    assert_int_equal(model_file_digest(m, hex, &e), RC_FAILED);
    assert_string_equal(e.code, "model_changed");
    model_file_close(m);
    buf_free(&list);
    remove_folder(&f);
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
        cmocka_unit_test(opens_a_folder_by_any_of_its_names),
        cmocka_unit_test(opens_shards),
        cmocka_unit_test(refuses_a_wrong_index),
        cmocka_unit_test(refuses_a_damaged_folder),
        cmocka_unit_test(gives_texts_and_the_template),
        cmocka_unit_test(digests_all_files_of_a_folder),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
