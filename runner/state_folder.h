/* state_folder: the folder of a state: its lock, its marker, and what a power cut may leave of it. Private to
 * state.c. */
#ifndef TANDEM_STATE_FOLDER_H
#define TANDEM_STATE_FOLDER_H

#include "base.h"
#include "state.h"

struct state_folder {
    char *path;
    int fd;
    int lock_fd;                 /* -1: opened for reading */
    char id[STATE_ID_CHARS + 1]; /* of the marker; "" while the state is not complete */
};

/* Errors as of state_open. Close in every case. */
enum rc state_folder_open(const char *path, enum state_mode mode, struct state_folder *out, struct err *e);
/* The database is complete and its id is `id`: writes the marker durably. */
enum rc state_folder_mark(struct state_folder *f, const char *id, struct err *e);
void state_folder_close(struct state_folder *f);

#endif
