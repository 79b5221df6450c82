/* One effect: where it is, whether it counts, what becomes of it, its line in the log. */

#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <spawn.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#define PATHS 1024
enum mode { RECORD, KILL_BEFORE, KILL_AFTER, TEAR, EIO_ONCE, ENOSPC_ONCE, EIO_ALWAYS, ENOSPC_ALWAYS, HOLD };

struct control {
    int64_t armed, mode, target, counter, fired, dead, held, released;
    char root[PATHS], log[PATHS], store[PATHS];
    pthread_mutex_t lock;
};

static struct control *control;
static char *own_preload, *own_control;
static char program[96];

/* -- set up ----------------------------------------------------------------------------------------------------------- */
static struct control *map_control(const char *path) {
    int fd = syscall(SYS_openat, AT_FDCWD, path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (fd < 0) return NULL;
    struct stat status;
    if (fstat(fd, &status) == 0 && status.st_size < (off_t)sizeof *control) syscall(SYS_ftruncate, fd, sizeof *control);
    void *found = (void *)syscall(SYS_mmap, NULL, sizeof *control, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    syscall(SYS_close, fd);
    return found == MAP_FAILED ? NULL : found;
}

/* Called from Python, by a process that is not preloaded, while no preloaded process makes effects. */
int shim_arm(const char *path, const char *root, const char *log, const char *store, long mode, long target) {
    struct control *c = map_control(path);
    if (!c) return -1;
    memset(c, 0, sizeof *c);
    pthread_mutexattr_t how;
    pthread_mutexattr_init(&how);
    pthread_mutexattr_setpshared(&how, PTHREAD_PROCESS_SHARED);
    pthread_mutexattr_setrobust(&how, PTHREAD_MUTEX_ROBUST);
    pthread_mutex_init(&c->lock, &how);
    snprintf(c->root, PATHS, "%s", root);
    snprintf(c->log, PATHS, "%s", log);
    snprintf(c->store, PATHS, "%s", store);
    c->mode = mode;
    c->target = target;
    c->armed = 1;
    munmap(c, sizeof *c);
    return 0;
}

__attribute__((constructor)) static void begin(void) {
    const char *path = getenv("LD_SHIM_CONTROL"), *preload = getenv("LD_PRELOAD");
    if (!path || !preload) return;
    control = map_control(path);
    if (asprintf(&own_preload, "LD_PRELOAD=%s", preload) < 0 || asprintf(&own_control, "LD_SHIM_CONTROL=%s", path) < 0) control = NULL;
    char words[256] = {0};
    int fd = syscall(SYS_openat, AT_FDCWD, "/proc/self/cmdline", O_RDONLY | O_CLOEXEC);
    long length = fd < 0 ? 0 : syscall(SYS_read, fd, words, sizeof words - 1);
    if (fd >= 0) syscall(SYS_close, fd);
    const char *shown[2] = {"", ""};
    int found = 0;
    for (long at = 0; at < length && found < 2; at += strlen(words + at) + 1) {
        const char *word = words + at;
        if (at && (word[0] == '-' || strchr(word, '=') || word[0] == '/')) continue; /* options, and git's -c and -C */
        const char *slash = strrchr(word, '/');
        shown[found++] = slash ? slash + 1 : word;
    }
    snprintf(program, sizeof program, "%.40s %.40s", shown[0], shown[1]);
    for (char *at = program; *at; at++)
        if (*at < ' ') *at = ' ';
}

/* -- paths ------------------------------------------------------------------------------------------------------------ */
static int of_descriptor(int fd, char *path) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    long length = syscall(SYS_readlinkat, AT_FDCWD, link, path, PATHS - 1);
    if (length < 0) return 0;
    path[length] = 0;
    return 1;
}

/* The absolute path, with "." and ".." taken out; links are not followed. */
static int absolute(int folder, const char *name, char *path) {
    char whole[2 * PATHS];
    if (!name) return 0;
    if (name[0] == '/')
        snprintf(whole, sizeof whole, "%s", name);
    else {
        char base[PATHS];
        if (folder == AT_FDCWD ? syscall(SYS_getcwd, base, PATHS) < 0 : !of_descriptor(folder, base)) return 0;
        snprintf(whole, sizeof whole, "%s/%s", base, name);
    }
    size_t end = 0;
    for (char *part = whole; *part;) {
        while (*part == '/') part++;
        char *next = strchrnul(part, '/');
        size_t length = next - part;
        if (length == 2 && !strncmp(part, "..", 2)) {
            while (end && path[--end] != '/') continue;
        } else if (length && !(length == 1 && *part == '.')) {
            if (end + length + 2 > PATHS) return 0;
            path[end++] = '/';
            memcpy(path + end, part, length);
            end += length;
        }
        part = next;
    }
    path[end] = 0;
    return 1;
}

static int ends(const char *path, size_t length, const char *with) {
    return length >= strlen(with) && !strcmp(path + length - strlen(with), with);
}

static int below(const char *path) {
    size_t length = strlen(control->root), whole = strlen(path);
    if (strncmp(path, control->root, length) || (path[length] && path[length] != '/')) return 0;
    return !ends(path, whole, " (deleted)") && !ends(path, whole, "-shm"); /* SQLite's shared memory: made anew after a crash */
}

static unsigned long inode(const char *path) {
    struct stat status;
    return fstatat(AT_FDCWD, path, &status, AT_SYMLINK_NOFOLLOW) ? 0 : status.st_ino;
}

static unsigned long inode_of_parent(const char *path) {
    char parent[PATHS];
    snprintf(parent, PATHS, "%s", path);
    char *slash = strrchr(parent, '/');
    if (slash) *slash = 0;
    return inode(parent);
}

/* -- one effect ------------------------------------------------------------------------------------------------------- */
struct effect {
    const char *kind;
    char path[PATHS], other[PATHS];
    long number;
    unsigned long ino, folder, other_folder;
    int counted, torn, writes;
};

static void die(void) {
    control->dead = 1;
    syscall(SYS_kill, syscall(SYS_getpid), SIGKILL);
    for (;;) pause();
}

/* Nothing else happens below the root until the campaign has looked at it: the lock is held. */
static void hold(long number) {
    struct timespec while_ = {0, 50000};
    control->held = number;
    while (control->armed && control->released < number) nanosleep(&while_, NULL);
}

static void stop_if_dead(void) {
    while (control->dead) {
        struct timespec while_ = {60, 0};
        nanosleep(&while_, NULL); /* until the server kills this process, too */
    }
}

/* A line of the log. */
static void note(struct effect *e, long error, long size) {
    char line[3 * PATHS];
    int length = snprintf(line, sizeof line, "%ld\t%s\t%ld\t%ld\t%lu\t%lu\t%lu\t%s\t%s\t%s\n", e->number, e->kind, error,
                          size, e->ino, e->folder, e->other_folder, e->path, e->other, program);
    int log = syscall(SYS_openat, AT_FDCWD, control->log, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    if (log >= 0) {
        syscall(SYS_write, log, line, length < (int)sizeof line ? length : (int)sizeof line);
        syscall(SYS_close, log);
    }
}

/* A file that has a hidden name, or lies in a folder that has, is opened to be read: not an effect, a line with the number 0. */
static void note_open(struct effect *e) {
    if (!below(e->path) || !strstr(e->path + strlen(control->root), "/.")) return;
    e->kind = "open";
    e->number = e->ino = e->folder = e->other_folder = e->other[0] = 0;
    if (pthread_mutex_lock(&control->lock) == EOWNERDEAD) pthread_mutex_consistent(&control->lock);
    note(e, 0, 0);
    pthread_mutex_unlock(&control->lock);
}

/* Returns 0, or the error that the effect is to fail with. The lock is held when e->counted. */
static int start(struct effect *e, const char *kind) {
    e->kind = kind;
    e->counted = e->torn = 0;
    if (!control || !control->armed) return 0;
    if (!below(e->path) && !(e->other[0] && below(e->other))) return 0;
    while (control->dead) stop_if_dead();
    if (pthread_mutex_lock(&control->lock) == EOWNERDEAD) pthread_mutex_consistent(&control->lock);
    stop_if_dead();
    e->counted = 1;
    e->number = ++control->counter;
    e->folder = inode_of_parent(e->path);
    e->other_folder = e->other[0] ? inode_of_parent(e->other) : 0;
    e->ino = inode(e->path);
    int here = e->number == control->target, later = control->target && e->number >= control->target;
    int spawns = !strcmp(kind, "spawn"), failure = spawns ? EAGAIN : EIO;
    int takes_space = !spawns && strcmp(kind, "unlink") && strcmp(kind, "rmdir") && strcmp(kind, "rename") && strcmp(kind, "mmap");
    if (here) control->fired = 1;
    switch (control->mode) {
    case KILL_BEFORE:
        if (here) note(e, -ECANCELED, 0), die();
        break;
    case TEAR:
        if (here && !e->writes) note(e, -ECANCELED, 0), die();
        e->torn = here;
        break;
    case HOLD: hold(e->number); break;
    case EIO_ONCE: return here ? failure : 0;
    case EIO_ALWAYS: return later ? failure : 0;
    case ENOSPC_ONCE: return here && takes_space ? ENOSPC : 0;
    case ENOSPC_ALWAYS: return later && takes_space ? ENOSPC : 0;
    }
    return 0;
}

static void keep_content(const char *path, long number) {
    char target[2 * PATHS], block[1 << 16];
    snprintf(target, sizeof target, "%s/%ld", control->store, number);
    int from = syscall(SYS_openat, AT_FDCWD, path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
    int to = syscall(SYS_openat, AT_FDCWD, target, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    long length;
    while (from >= 0 && to >= 0 && (length = syscall(SYS_read, from, block, sizeof block)) > 0) syscall(SYS_write, to, block, length);
    struct stat status; /* of when it was written, as the disk keeps it */
    if (from >= 0 && to >= 0 && !fstat(from, &status)) syscall(SYS_utimensat, to, NULL, (struct timespec[]){status.st_atim, status.st_mtim}, 0);
    if (from >= 0) syscall(SYS_close, from);
    if (to >= 0) syscall(SYS_close, to);
}

static long finish(struct effect *e, long result, long size) {
    if (!e->counted) return result;
    int error = errno;
    int syncs = !strcmp(e->kind, "fsync") || !strcmp(e->kind, "fdatasync");
    if (result >= 0 && (!strcmp(e->kind, "create") || !strcmp(e->kind, "mkdir"))) e->ino = inode(e->path);
    if (result >= 0 && (!strcmp(e->kind, "link") || !strcmp(e->kind, "symlink"))) e->ino = inode(e->path);
    if (syncs && result >= 0 && control->store[0]) keep_content(e->path, e->number);
    note(e, result < 0 ? -error : 0, size);
    if (control->mode == KILL_AFTER && e->number == control->target) die();
    if (e->torn) die();
    pthread_mutex_unlock(&control->lock);
    errno = error;
    return result;
}

#define FAIL(e, error) ((errno = (error)), finish(e, -1, 0))

static int on_descriptor(struct effect *e, int fd) {
    e->other[0] = e->writes = 0;
    struct stat status;
    if (!control || !control->armed || !of_descriptor(fd, e->path) || e->path[0] != '/') e->path[0] = 0;
    else if (fstat(fd, &status) || (!S_ISREG(status.st_mode) && !S_ISDIR(status.st_mode))) e->path[0] = 0;
    return e->path[0] != 0;
}

static void on_path(struct effect *e, int folder, const char *name) {
    e->other[0] = e->writes = 0;
    if (!control || !control->armed || !absolute(folder, name, e->path)) e->path[0] = 0;
}

static void and_path(struct effect *e, int folder, const char *name) {
    if (!control || !control->armed || !absolute(folder, name, e->other)) e->other[0] = 0;
}

