/* bench_text: each block says its number several times, so that a model that reads it has something to look up, and no two blocks
 * are equal. */
#include "bench_text.h"

#include <stdio.h>
#include <string.h>

static const char code_block[] =
    "/* Section %d: a table of %d records, looked up by key. */\n"
    "struct record_%d {\n    uint64_t key;\n    double weight;\n    char name[%d];\n};\n\n"
    "static int compare_%d(const void *a, const void *b)\n{\n"
    "    const struct record_%d *left = a, *right = b;\n"
    "    return (left->key > right->key) - (left->key < right->key);\n}\n\n"
    "double total_weight_%d(const struct record_%d *table, size_t n, double limit)\n{\n"
    "    double total = 0.0;\n    for (size_t i = 0; i < n; i++) {\n"
    "        if (table[i].weight > limit) continue;\n        total += table[i].weight * %d;\n    }\n    return total;\n}\n\n";

static const char chinese_block[] =
    "第%d节 关于第%d号仓库的记录。\n"
    "仓库建于河边，分为东西两区，共有%d个货架，每个货架都有编号。管理员每天清晨检查温度和湿度，并把结果写入第%d号账册。"
    "如果发现货物受潮，应当立即移到西区，并通知第%d组的值班人员。去年秋天，这里存放了%d箱茶叶和瓷器，运往南方的三座城市。"
    "根据第%d条规定，任何人进入库房都要登记姓名、时间和事由；离开时由两名管理员共同核对第%d份清单，确认无误后方可放行。\n\n";

/* A block's text; returns its length. */
static int write_block(bool chinese, int number, char *out, size_t size)
{
    const int n = number, size_of_it = number % 90 + 10;
    if (chinese) return snprintf(out, size, chinese_block, n, n, size_of_it, n, n % 7 + 1, size_of_it * 3, n % 40 + 1, n);
    return snprintf(out, size, code_block, n, size_of_it, n, size_of_it, n, n, n, n, n % 13 + 2);
}

enum rc bench_text(struct tokenizer *t, bool chinese, int32_t *out, size_t n, struct err *e)
{
    enum { BLOCKS_OF_A_LENGTH = 7 };
    char text[2048];
    struct token_list tokens = {0};
    int number = (int)(n % 100000) * BLOCKS_OF_A_LENGTH % 900000 + 1;
    enum rc rc = RC_OK;
    for (size_t at = 0; at < n && rc == RC_OK;) {
        const int len = write_block(chinese, number++, text, sizeof text);
        tokens.len = 0;
        rc = tokenizer_encode(t, text, (size_t)len, false, &tokens, e);
        if (rc == RC_OK && !tokens.len) rc = err_set(e, RC_BAD_INPUT, EXIT_UNAVAILABLE, "no_tokens", "the tokenizer makes no tokens of text");
        const size_t here = tokens.len < n - at ? tokens.len : n - at;
        if (rc == RC_OK) memcpy(out + at, tokens.ids, here * sizeof *out);
        at += here;
    }
    token_list_free(&tokens);
    return rc;
}
