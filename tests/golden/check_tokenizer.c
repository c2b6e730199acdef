/* check_tokenizer: a tokenizer out of JSON files against expected ids, for tokenizer_json.py, which makes both.
 *
 *     check_tokenizer FOLDER
 *
 * FOLDER holds tokenizer.json, perhaps tokenizer_config.json and generation_config.json, and expected.txt: a first line
 * "VOCAB HOLES END..." and then lines "TEXT|IDS|IDS|TEXT": a text, its ids as user text, its ids with control tokens
 * recognized, and what the former decode to, texts as hexadecimal digits. Prints what differs; exit status 0 when nothing
 * does. */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tokenizer_private.h"

static int n_wrong;

static void read_text(const char *folder, const char *name, struct buf *bytes, struct model_text *out)
{
    char path[4096];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    if (file_read(path, (size_t)64 << 20, bytes, NULL) == RC_OK) *out = (struct model_text){bytes->data, bytes->len};
}

static void read_hex(const char *hex, struct buf *out)
{
    buf_clear(out);
    for (; hex[0] && hex[1]; hex += 2) {
        char digits[3] = {hex[0], hex[1], '\0'}, byte = (char)strtoul(digits, NULL, 16);
        buf_append(out, &byte, 1);
    }
    buf_append(out, "", 0);
}

static void compare(const char *what, const char *hex, const struct token_list *got, const char *want)
{
    struct buf shown = {0};
    for (size_t i = 0; i < got->len; i++) buf_printf(&shown, "%s%d", i ? " " : "", got->ids[i]);
    if (strcmp(shown.data ? shown.data : "", want) != 0 && n_wrong++ < 10)
        printf("%s of %s:\n  want %s\n  got  %s\n", what, hex, want, shown.data ? shown.data : "");
    buf_free(&shown);
}

static void check_line(struct tokenizer *t, char *line)
{
    char *at = line, *hex = strsep(&at, "|"), *user = strsep(&at, "|"), *special = strsep(&at, "|"), *decoded = at;
    struct buf text = {0}, back = {0}, whole = {0}, want = {0};
    struct token_list ids = {0};
    if (!decoded) {
        printf("not a line of four parts: %s\n", hex);
        n_wrong++;
        return;
    }
    read_hex(hex, &text);
    read_hex(decoded, &want);
    if (tokenizer_encode(t, text.data, text.len, true, &ids, NULL) != RC_OK) n_wrong++;
    compare("tokens with control tokens", hex, &ids, special);
    ids.len = 0;
    if (tokenizer_encode(t, text.data, text.len, false, &ids, NULL) != RC_OK) n_wrong++;
    compare("tokens", hex, &ids, user);
    for (size_t i = 0; i < ids.len; i++) tokenizer_decode(t, ids.ids[i], true, &back);
    utf8_append_complete(&whole, back.data ? back.data : "", back.len);
    if ((whole.len != want.len || (want.len && memcmp(whole.data, want.data, want.len) != 0)) && n_wrong++ < 10)
        printf("decoded text of %s differs\n", hex);
    token_list_free(&ids);
    buf_free(&text);
    buf_free(&back);
    buf_free(&whole);
    buf_free(&want);
}

static void check_head(const struct tokenizer *t, const char *line)
{
    const int32_t *holes;
    struct buf got = {0};
    buf_printf(&got, "%d %zu", tokenizer_vocab(t), tokenizer_holes(t, &holes));
    for (int32_t id = 0; id < tokenizer_vocab(t); id++)
        if (tokenizer_is_end(t, id)) buf_printf(&got, " %d", id);
    if (strcmp(got.data, line) != 0) {
        printf("vocabulary, holes, ends:\n  want %s\n  got  %s\n", line, got.data);
        n_wrong++;
    }
    buf_free(&got);
}

int main(int argc, char **argv)
{
    if (argc != 2) return fputs("usage: check_tokenizer FOLDER\n", stderr), 64;
    struct buf bytes[3] = {{0}}, expected = {0};
    struct model_text lines = {NULL, 0};
    struct tokenizer_texts texts = {.tokenizer = {0}};
    struct tokenizer *t = NULL;
    struct err e = {0};
    read_text(argv[1], "tokenizer.json", &bytes[0], &texts.tokenizer);
    read_text(argv[1], "tokenizer_config.json", &bytes[1], &texts.config);
    read_text(argv[1], "generation_config.json", &bytes[2], &texts.generation);
    read_text(argv[1], "expected.txt", &expected, &lines);
    int64_t start_us = clock_now_us();
    if (tokenizer_open_json(&texts, &(struct tokenizer_options){0}, &t, &e) != RC_OK) {
        char shown[1200];
        printf("%s\n", err_format(&e, shown, sizeof shown));
        return 1;
    }
    printf("opened in %lld ms\n", (long long)(clock_now_us() - start_us) / 1000);
    int n = 0;
    for (char *at = expected.data, *line; at && (line = strsep(&at, "\n")) && *line; n++)
        if (n == 0) check_head(t, line);
        else check_line(t, line);
    printf("%d texts, %d differences\n", n - 1, n_wrong);
    tokenizer_close(t);
    for (size_t i = 0; i < 3; i++) buf_free(&bytes[i]);
    buf_free(&expected);
    return n > 1 && n_wrong == 0 ? 0 : 1;
}
