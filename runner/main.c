/* main: the command line's front door. Picks a verb from the table, parses its options, returns its exit status.
 *
 * `tandem rank` is hidden: the runner starts it with a command line of its own. Files are private (umask 077): state
 * and archives hold prompts and answers. A closed pipe is a failed write, never a signal; SIGUSR1 asks a run how far it is
 * and ends no command. */
#define _GNU_SOURCE
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include "build_identity.h"
#include "options.h"
#include "rank_main.h"

const struct command command_table[] = {
    {"check", "JOBS... [--model M]",
     "Validates job files. Every problem goes to standard output as file:line:column: code: "
     "text. With a model, also whether prompts fit its context.",
     cmd_check, false},
    {"plan", "JOBS... --model M [--json]",
     "What a run would compute, without computing it: jobs, prompt tokens, how many of them several prompts share (computed once "
     "with run --cache), the longest shared heads, which jobs would fail and why.",
     cmd_plan, false},
    {"run", "JOBS... --model M --out OUT", "Runs all jobs and writes their records into one archive.", cmd_run, false},
    {"status", "OUT|DIR [--json]", "Counts of an archive or a state folder: done, failed, pending, tokens, attempts.",
     cmd_status, false},
    {"export", "--out OUT [--state DIR]", "Writes an archive of what a state holds now.", cmd_export, false},
    {"retry-failed", "--out OUT|--state DIR [--code CODE] [--status N] [--dry-run]",
     "Takes error records out of a state, so that the next run computes their jobs again.", cmd_retry_failed, false},
    {"model", "M", "What a model file holds, and what each rank will hold of it.", cmd_model, false},
    {"tokenize", "M < TEXT", "Token ids of standard input.", cmd_tokenize, false},
    {"shard", "M --ranks N --out DIR [--verify]",
     "Cuts a model into a folder of one part a rank, so that a rank reads no more than its own. The folder is a model for that "
     "number of ranks: same answers, same identity.",
     cmd_shard, false},
    {"cache", "stat|verify|prune DIR",
     "What a folder of stored prompts holds; reads all of it and deletes what is damaged; deletes what is no longer "
     "wanted.",
     cmd_cache, false},
    {"bench", "decode|prefill|round|kernel|sum --model M", "Measures the engine alone.", cmd_bench, false},
    {0}};

static const struct command *command_find(const char *name)
{
    for (const struct command *c = command_table; c->name; c++)
        if (!strcmp(c->name, name)) return c;
    return NULL;
}

static int usage_error(const char *text, const char *what)
{
    fprintf(stderr, "tandem: %s%s%s\n", text, *what ? " " : "", what);
    return EXIT_USAGE;
}

/* Standard output may be a full disk or a closed pipe; what was asked for must not be lost in silence. */
static int flushed(int status)
{
    if (fflush(stdout) == 0 && !ferror(stdout)) return status;
    fprintf(stderr, "tandem: cannot write to standard output\n");
    return EXIT_IO;
}

static int help(const char *name)
{
    const struct command *c = name ? command_find(name) : NULL;
    if (name && !c) return usage_error("there is no command", name);
    options_print_help(c);
    return EXIT_DONE;
}

static bool asks_for_help(int argc, char **argv)
{
    for (int i = 2; i < argc && strcmp(argv[i], "--"); i++)
        if (!strcmp(argv[i], "--help") || !strcmp(argv[i], "-h")) return true;
    return false;
}

static int run_command(int argc, char **argv)
{
    if (argc < 2) return usage_error("no command; tandem --help lists them", "");
    const char *name = argv[1];
    if (!strcmp(name, "--help") || !strcmp(name, "-h") || !strcmp(name, "help")) return help(argc > 2 ? argv[2] : NULL);
    if (!strcmp(name, "--version")) return printf("tandem %s\n", TANDEM_VERSION), EXIT_DONE;
    if (!strcmp(name, "--man")) return options_print_man(), EXIT_DONE;
    const struct command *c = command_find(name);
    if (!c) return usage_error("there is no command", name);
    if (asks_for_help(argc, argv)) return help(name);
    struct options o;
    struct err e = {0};
    if (options_parse(c, argc, argv, &o, &e) != RC_OK) {
        fprintf(stderr, "tandem: %s\ntandem: tandem help %s lists the options\n", e.text, name);
        return e.exit_status ? e.exit_status : EXIT_USAGE;
    }
    return c->run(&o);
}

int main(int argc, char **argv)
{
    umask(077);
    signal(SIGPIPE, SIG_IGN);
    signal(SIGUSR1, SIG_IGN);
    if (argc > 1 && !strcmp(argv[1], "rank")) return rank_main(argc, argv);
    return flushed(run_command(argc, argv));
}
