/* cmd_tokenize: standard input to token ids, as the runner would make them.
 *
 * Plain text by default; with --chat-format the text is one user message inside that format. --show puts the piece
 * of text of each id beside it, control bytes escaped. */
#define _GNU_SOURCE
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "chat_template.h"
#include "model_file.h"
#include "options.h"
#include "tokenizer.h"

static const size_t input_max_bytes = (size_t)64 << 20;

static enum rc input_read(struct buf *out, struct err *e)
{
    for (;;) {
        if (!buf_reserve(out, 1 << 16)) return err_no_memory(e);
        ssize_t n = read(STDIN_FILENO, out->data + out->len, (size_t)1 << 16);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) return err_errno(e, RC_FAILED, EXIT_IO, "read_failed", "cannot read standard input");
        if (n == 0) return RC_OK;
        out->len += (size_t)n;
        if (out->len > input_max_bytes)
            return err_set(e, RC_BAD_INPUT, EXIT_NO_INPUT, "too_large", "standard input has more than 64 MiB");
    }
}

static enum rc encode(const struct options *o, const struct model_file *m, struct tokenizer *t, const struct buf *text,
                      struct token_list *out, struct err *e)
{
    if (!o->chat_format) return tokenizer_encode(t, text->data, text->len, false, out, e);
    struct chat_message message = {.role = "user", .text = text->data, .len = text->len};
    struct chat chat = {.messages = &message, .n_messages = 1};
    enum rc rc = chat_format_choose(o->chat_format, m, t, &chat.format, e);
    return rc == RC_OK ? chat_template_encode(&chat, t, out, e) : rc;
}

static void piece_print(const struct buf *piece)
{
    bool whole = utf8_valid(piece->data ? piece->data : "", piece->len);
    for (size_t i = 0; i < piece->len; i++) {
        unsigned char c = (unsigned char)piece->data[i];
        if (c == '\n')
            fputs("\\n", stdout);
        else if (c == '\t')
            fputs("\\t", stdout);
        else if (c == '\\')
            fputs("\\\\", stdout);
        else if (c < 0x20 || c == 0x7F || (c >= 0x80 && !whole))
            printf("\\x%02x", c);
        else
            putchar(c);
    }
}

static bool ids_print(const struct options *o, struct tokenizer *t, const struct token_list *ids)
{
    struct buf piece = {0};
    for (size_t i = 0; i < ids->len && !piece.failed; i++) {
        if (!o->show) {
            printf("%s%d", i ? " " : "", ids->ids[i]);
            continue;
        }
        buf_clear(&piece);
        tokenizer_decode(t, ids->ids[i], true, &piece);
        printf("%d\t", ids->ids[i]);
        piece_print(&piece);
        putchar('\n');
    }
    if (!o->show) putchar('\n');
    bool good = !piece.failed;
    buf_free(&piece);
    return good;
}

int cmd_tokenize(const struct options *o)
{
    struct err e = {0};
    struct model_file *m = NULL;
    struct tokenizer *t = NULL;
    struct buf text = {0};
    struct token_list ids = {0};
    char line[1100];
    enum rc rc = model_file_open(o->files[0], &m, &e);
    if (rc == RC_OK) rc = tokenizer_open(m, &t, &e);
    if (rc == RC_OK) rc = input_read(&text, &e);
    if (rc == RC_OK) rc = encode(o, m, t, &text, &ids, &e);
    if (rc == RC_OK && !ids_print(o, t, &ids)) rc = err_no_memory(&e);
    if (rc != RC_OK) log_line(LOG_ERROR, "%s", err_format(&e, line, sizeof line));
    token_list_free(&ids);
    buf_free(&text);
    tokenizer_close(t);
    model_file_close(m);
    return rc == RC_OK ? EXIT_DONE : e.exit_status ? e.exit_status : EXIT_INTERNAL;
}
