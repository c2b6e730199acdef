/* options: every type of value, bounds, rules between options, messages; help and man page name every option. */
#define _GNU_SOURCE
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "options.h"
#include "rank_backend.h"

static int nothing(const struct options *o)
{
    (void)o;
    return 0;
}

const struct command command_table[] = {{"check", "JOBS...", "Checks.", nothing, false},
                                        {"run", "JOBS... --model M --out OUT", "Runs.", nothing, false},
                                        {"plan", "JOBS", "Plans.", nothing, false},
                                        {"status", "OUT", "Counts.", nothing, false},
                                        {"export", "--out OUT", "Exports.", nothing, false},
                                        {"model", "M", "Shows.", nothing, false},
                                        {"tokenize", "M", "Tokenizes.", nothing, false},
                                        {"cache", "WHAT DIR", "Looks.", nothing, false},
                                        {"bench", "WHAT", "Measures.", nothing, false},
                                        {"secret", "", "Hidden.", nothing, true},
                                        {0}};

enum { MAX_WORDS = 300 };

/* Parses "run a --model m" as a command line. Texts of *out point into static memory, as argv does. */
static enum rc parse(const char *line, struct options *out, struct err *e)
{
    static char words[8192];
    static char program[] = "tandem";
    char *argv[MAX_WORDS] = {program};
    int argc = 1;
    snprintf(words, sizeof words, "%s", line);
    for (char *save = NULL, *word = strtok_r(words, " ", &save); word; word = strtok_r(NULL, " ", &save)) {
        assert_true(argc < MAX_WORDS);
        argv[argc++] = word;
    }
    const struct command *c = command_table;
    while (c->name && strcmp(c->name, argv[1])) c++;
    assert_non_null(c->name);
    *e = (struct err){0};
    return options_parse(c, argc, argv, out, e);
}

static void good(const char *line, struct options *out)
{
    struct err e;
    if (parse(line, out, &e) != RC_OK) fail_msg("%s: %s", line, e.text);
}

static void bad(const char *line, const char *shown)
{
    struct options o;
    struct err e;
    if (parse(line, &o, &e) != RC_BAD_INPUT) fail_msg("accepted: %s", line);
    assert_int_equal(e.exit_status, EXIT_USAGE);
    if (!strstr(e.text, shown)) fail_msg("%s: \"%s\" lacks \"%s\"", line, e.text, shown);
}

static void test_standard_values(void **ctx)
{
    (void)ctx;
    struct options o;
    good("run a.jsonl --model m.gguf --out x.tar", &o);
    assert_int_equal(o.n_files, 1);
    assert_string_equal(o.files[0], "a.jsonl");
    assert_string_equal(o.model, "m.gguf");
    assert_string_equal(o.out, "x.tar");
    assert_null(o.state);
    assert_null(o.root);
    assert_null(o.chat_format);
    assert_string_equal(o.backend, "auto");
    assert_string_equal(o.isa, "auto");
    assert_int_equal(o.ranks, rank_backend_ranks(&o)); /* 2 but on a machine with one GPU */
    assert_int_equal(o.groups, 1);
    assert_int_equal(o.threads, 0);
    assert_int_equal(o.active, 4);
    assert_int_equal(o.context, 0);
    assert_int_equal(o.kv_tokens, 0);
    assert_int_equal(o.prefill_rows, 0);
    assert_int_equal(o.bounds.collective_us, 20000000);
    assert_int_equal(o.bounds.lockstep_us, 40000000);
    assert_int_equal(o.bounds.watchdog_us, 90000000);
    assert_true(o.grace_s == 20);
    assert_true(o.deadline.at_s == INT64_MAX && o.deadline.until_min == -1 && o.deadline.window.from_min == -1);
    assert_true(!o.final && o.job_timeout_us == 0);
    assert_int_equal(o.restarts, 5);
    assert_int_equal(o.job_failures, 3);
    assert_false(o.skip_bad_lines || o.force || o.trace || o.quiet || o.json || o.show);
    assert_int_equal(o.fault.kind, FAULT_NONE);
}

static void test_no_cache(void **ctx)
{
    (void)ctx;
    struct options o;
    good("run a --model m --out x --cache c", &o);
    assert_string_equal(o.cache, "c");
    good("run a --model m --out x --no-cache --cache c", &o);
    assert_null(o.cache);
    bad("plan a --model m --no-cache", "--no-cache");
}

static void test_every_type(void **ctx)
{
    (void)ctx;
    struct options o;
    good("run a b --model=m --out=x=y --state s --root r --ranks 3 --groups=2 --threads 7 --active 8 --context 4096 "
         "--kv-tokens 1000000000000 --prefill-rows 128 --backend cpu --isa avx2 --chat-format chatml "
         "--collective-timeout 0.5 --lockstep-timeout 1.25 --watchdog 2 --grace 0.75 --restarts 0 --job-failures 1 "
         "--on-bad-line skip --force --trace --quiet --fault 2:token@12",
         &o);
    assert_int_equal(o.n_files, 2);
    assert_string_equal(o.files[1], "b");
    assert_string_equal(o.out, "x=y");
    assert_string_equal(o.state, "s");
    assert_string_equal(o.root, "r");
    assert_int_equal(o.ranks, 3);
    assert_int_equal(o.groups, 2);
    assert_int_equal(o.threads, 7);
    assert_int_equal(o.active, 8);
    assert_int_equal(o.context, 4096);
    assert_true(o.kv_tokens == 1000000000000);
    assert_int_equal(o.prefill_rows, 128);
    assert_string_equal(o.backend, "cpu");
    assert_string_equal(o.isa, "avx2");
    assert_string_equal(o.chat_format, "chatml");
    assert_int_equal(o.bounds.collective_us, 500000);
    assert_int_equal(o.bounds.lockstep_us, 1250000);
    assert_int_equal(o.bounds.watchdog_us, 2000000);
    assert_true(o.grace_s == 0.75);
    assert_int_equal(o.restarts, 0);
    assert_int_equal(o.job_failures, 1);
    assert_true(o.skip_bad_lines && o.force && o.trace && o.quiet);
    assert_int_equal(o.fault.kind, FAULT_TOKEN);
    assert_int_equal(o.fault.rank, 2);
    assert_int_equal(o.fault.step, 12);
    good("run a --model m --out x --on-bad-line fail", &o);
    assert_false(o.skip_bad_lines);
    good("bench decode --model m --prompt 64 --tokens 32 --sequences 2 --repeats 1", &o);
    assert_int_equal(o.bench_prompt, 64);
    assert_int_equal(o.bench_tokens, 32);
    assert_int_equal(o.bench_sequences, 2);
    assert_int_equal(o.bench_repeats, 1);
    good("run a --model m --out x --deadline 2026-01-02T06:00:00Z --until 05:30 --window 22:00-06:00 --final --job-timeout 1.5", &o);
    assert_int_equal(o.deadline.at_s, 1767333600);
    assert_int_equal(o.deadline.until_min, 330);
    assert_int_equal(o.deadline.window.from_min, 1320);
    assert_int_equal(o.deadline.window.to_min, 360);
    assert_true(o.final);
    assert_int_equal(o.job_timeout_us, 1500000);
    good("export --out x --final", &o);
    assert_true(o.final);
    good("run a --model m --out x --order tree --output-order completion", &o);
    assert_string_equal(o.order, "tree");
    assert_true(o.output_by_completion);
    good("export --out x --output-order input", &o);
    assert_false(o.output_by_completion);
    good("plan a b --model m --json --prefill-rate 1500.5 --decode-rate 40", &o);
    assert_int_equal(o.n_files, 2);
    assert_true(o.json && o.prefill_rate == 1500.5 && o.decode_rate == 40);
    good("status out.tar --json", &o);
    assert_true(o.json);
    good("tokenize m --show", &o);
    assert_true(o.show);
}

static void test_dashes(void **ctx)
{
    (void)ctx;
    struct options o;
    good("check -- --model -x", &o);
    assert_int_equal(o.n_files, 2);
    assert_string_equal(o.files[0], "--model");
    assert_string_equal(o.files[1], "-x");
    good("check -", &o);
    assert_string_equal(o.files[0], "-");
    good("run a --model m --out --quiet", &o); /* a value may look like an option */
    assert_string_equal(o.out, "--quiet");
}

static void test_bad_values(void **ctx)
{
    (void)ctx;
    bad("run a --model m --out x --ranks 0", "--ranks 0: must be a whole number from 1 to 4");
    bad("run a --model m --out x --ranks 5", "from 1 to 4");
    bad("run a --model m --out x --ranks two", "--ranks two");
    bad("run a --model m --out x --ranks 2.0", "--ranks 2.0");
    bad("run a --model m --out x --ranks -1", "--ranks -1");
    bad("run a --model m --out x --ranks 99999999999999999999", "--ranks");
    bad("run a --model m --out x --ranks= ", "--ranks");
    bad("run a --model m --out x --ranks 0x2", "--ranks 0x2");
    bad("cache stat", "stat, verify or prune, and a folder");
    bad("cache stat d e", "unexpected argument e");
    bad("cache state d", "not state");
    bad("cache prune d", "--to and --unused");
    bad("cache verify d --unused 0", "--to and --unused");
    bad("cache prune d --to -1", "--to -1");
    bad("run a --model m --out x --grace inf", "--grace inf");
    bad("run a --model m --out x --grace nan", "--grace nan");
    bad("run a --model m --out x --grace 1e3", "--grace 1e3");
    bad("run a --model m --out x --grace 1.2.3", "--grace 1.2.3");
    bad("run a --model m --out x --grace .", "--grace .");
    bad("run a --model m --out x --watchdog 0", "--watchdog 0");
    bad("run a --model m --out x --backend gpu", "must be one of auto|cpu|cuda");
    bad("run a --model m --out x --isa avx", "--isa avx");
    bad("run a --model m --out x --isa avx2|generic", "--isa");
    bad("run a --model m --out x --on-bad-line never", "fail|skip");
    bad("run a --model= --out x", "--model");
    bad("run a --model m --out x --force=yes", "--force takes no value");
    bad("run a --out x --model", "--model needs a value");
    bad("run a --model m --out x --prefill-rows 100", "multiple of 64");
    bad("run a --model m --out x --fault 1:burn@3", "");
    bad("run a --model m --out x --fault 2:exit@3", "rank 2 of 2");
    bad("run a --model m --out x --active 65", "--active 65");
    bad("run a --model m --out x --deadline 06:00", "--deadline 06:00: must be a time as 2026-01-02T06:00:00Z");
    bad("run a --model m --out x --deadline 2026-02-29T06:00:00Z", "--deadline 2026-02-29");
    bad("run a --model m --out x --until 24:00", "--until 24:00: must be a time as 06:00");
    bad("run a --model m --out x --window 22:00", "--window 22:00: must be two different times as 22:00-06:00");
    bad("run a --model m --out x --window 06:00-06:00", "two different times");
    bad("run a --model m --out x --job-timeout 0", "--job-timeout 0: must be a number from 0.001 to 31536000");
    bad("check a --until 06:00", "no option --until");
    bad("run a --model m --out x --output-order tree", "--output-order tree: must be one of input|completion");
    bad("plan --model m", "tandem plan needs job files");
    bad("plan a", "tandem plan needs --model");
    bad("plan a --model m --decode-rate 5", "--prefill-rate and --decode-rate");
    bad("plan a --model m --prefill-rate 0 --decode-rate 5", "--prefill-rate 0");
}

static void test_rules(void **ctx)
{
    (void)ctx;
    struct options o;
    bad("run --model m --out x", "needs job files");
    bad("run a --out x", "needs --model");
    bad("run a --model m", "needs --out");
    bad("export --state s", "needs --out");
    bad("export --out x extra", "unexpected argument extra");
    bad("status a b", "unexpected argument b");
    bad("bench fast --model m", "decode, prefill, round, kernel or sum");
    good("bench round --model m --as-rank 0/2 --accept 0.7 --text zh --csv", &o);
    assert_string_equal(o.bench_as, "0/2");
    assert_string_equal(o.bench_text, "zh");
    assert_true(o.bench_accept > 0.69 && o.bench_accept < 0.71 && o.csv);
    bad("bench decode", "needs --model");
    bad("bench decode --model m --active 2 --sequences 3", "--sequences 3");
    bad("run a --model m --out x --collective-timeout 50", "");
    bad("run a --model m --out x --watchdog 30", "");
}

static void test_unknown(void **ctx)
{
    (void)ctx;
    bad("run a --modle m --out x", "did you mean --model?");
    bad("run a --kv-token 5", "did you mean --kv-tokens?");
    bad("run a --completely-else", "unknown option --completely-else");
    bad("check a --ranks 2", "tandem check has no option --ranks");
    bad("run a -m x", "options begin with --");
    bad("run a --rank 2", "did you mean --ranks?");
    char line[6000] = "check";
    for (int i = 0; i < OPTIONS_MAX_FILES; i++) strcat(line, " f");
    struct options o;
    good(line, &o);
    assert_int_equal(o.n_files, OPTIONS_MAX_FILES);
    strcat(line, " g");
    bad(line, "unexpected argument g");
}

static void test_state_folder(void **ctx)
{
    (void)ctx;
    static const struct {
        const char *out, *state, *folder;
    } cases[] = {{"x.tar.zst", NULL, "x.tar.zst.state"},
                 {"dir/", NULL, "dir.state"},
                 {"dir//", NULL, "dir.state"},
                 {"/", NULL, "/.state"},
                 {"x.tar", "elsewhere", "elsewhere"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct options o = {.out = cases[i].out, .state = cases[i].state};
        struct buf folder = {0};
        assert_int_equal(options_state_folder(&o, &folder, NULL), RC_OK);
        assert_string_equal(folder.data, cases[i].folder);
        buf_free(&folder);
    }
}

/* What print writes to standard output. The caller frees. */
static char *printed(void (*print)(void))
{
    fflush(stdout);
    int saved = dup(STDOUT_FILENO);
    FILE *file = tmpfile();
    assert_non_null(file);
    dup2(fileno(file), STDOUT_FILENO);
    print();
    fflush(stdout);
    dup2(saved, STDOUT_FILENO);
    close(saved);
    long size = (fseek(file, 0, SEEK_END), ftell(file));
    rewind(file);
    char *text = calloc(1, (size_t)size + 1);
    assert_int_equal(fread(text, 1, (size_t)size, file), size);
    fclose(file);
    return text;
}

static void print_run_help(void) { options_print_help(&command_table[1]); }
static void print_whole_help(void) { options_print_help(NULL); }

static void test_help(void **ctx)
{
    (void)ctx;
    char *text = printed(print_run_help);
    assert_non_null(strstr(text, "usage: tandem run JOBS... --model M --out OUT"));
    assert_non_null(strstr(text, "--kv-tokens TOKENS"));
    assert_non_null(strstr(text, "--fault RANK:KIND@STEP"));
    assert_non_null(strstr(text, "Test option"));
    assert_null(strstr(text, "--repeats"));
    for (const char *line = text; *line; line += strcspn(line, "\n") + 1)
        if (strcspn(line, "\n") > 80) fail_msg("too wide: %.*s", (int)strcspn(line, "\n"), line);
    free(text);
    text = printed(print_whole_help);
    assert_non_null(strstr(text, "tandem bench WHAT"));
    assert_null(strstr(text, "secret"));
    static const char *const statuses[] = {"\n   0  ", "\n   1  ", "\n  64  ", "\n  65  ", "\n  66  ", "\n  69  ",
                                           "\n  70  ", "\n  73  ", "\n  74  ", "\n  75  ", "\n  78  "};
    for (size_t i = 0; i < sizeof statuses / sizeof *statuses; i++) assert_non_null(strstr(text, statuses[i]));
    free(text);
}

static void test_man(void **ctx)
{
    (void)ctx;
    char *text = printed(options_print_man);
    assert_int_equal(strncmp(text, ".TH TANDEM 1 ", 13), 0);
    assert_non_null(strstr(text, "\\fB\\-\\-kv\\-tokens\\fR \\fITOKENS\\fR\n"));
    assert_non_null(strstr(text, ".SH EXIT STATUS\n"));
    assert_null(strstr(text, "secret"));
    free(text);
}

int main(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_standard_values), cmocka_unit_test(test_no_cache),
        cmocka_unit_test(test_every_type), cmocka_unit_test(test_dashes),
        cmocka_unit_test(test_bad_values),      cmocka_unit_test(test_rules),      cmocka_unit_test(test_unknown),
        cmocka_unit_test(test_state_folder),    cmocka_unit_test(test_help),       cmocka_unit_test(test_man),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
