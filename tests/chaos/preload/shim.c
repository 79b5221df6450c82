/* Counts every durable effect below one folder, of all processes of a tree, and makes the Nth fail, tear or be the last.
 *
 * Preloaded (LD_PRELOAD, LD_SHIM_CONTROL=FILE). The control file is shared memory: one counter, one lock, one order of effects. Effects are
 * made under the lock, so the log is their order. A process that reaches the Nth effect ends itself by SIGKILL; from then on no other
 * process makes an effect (it waits until tests.chaos.server kills it), as if all had died at once.
 *
 * Not covered: programs linked statically, system calls that are not made through libc's functions, what is written through shared mappings
 * (the mapping is logged as "mmap"), changes of modes, owners and times. stdio's writes inside libc are seen when the file is closed.
 */
#include "effects.h"

/* -- writes ----------------------------------------------------------------------------------------------------------- */
static long written(int number, const char *kind, int fd, const void *data, size_t size, off_t at) {
    struct effect e;
    on_descriptor(&e, fd);
    e.writes = 1;
    int error = start(&e, kind);
    if (error) return FAIL(&e, error);
    if (e.torn) size /= 2;
    return finish(&e, number == SYS_write ? syscall(number, fd, data, size) : syscall(number, fd, data, size, at), size);
}

ssize_t write(int fd, const void *data, size_t size) { return written(SYS_write, "write", fd, data, size, 0); }
ssize_t pwrite(int fd, const void *data, size_t size, off_t at) { return written(SYS_pwrite64, "pwrite", fd, data, size, at); }
ssize_t pwrite64(int fd, const void *data, size_t size, off64_t at) { return written(SYS_pwrite64, "pwrite", fd, data, size, at); }

static long written_parts(const char *kind, int fd, const struct iovec *parts, int count, off_t at, int placed, int flags) {
    struct effect e;
    on_descriptor(&e, fd);
    e.writes = 1;
    int error = start(&e, kind);
    if (error) return FAIL(&e, error);
    long size = 0;
    for (int i = 0; i < count; i++) size += parts[i].iov_len;
    struct iovec half;
    if (e.torn && count) half = (struct iovec){parts[0].iov_base, parts[0].iov_len / 2}, parts = &half, count = 1;
    return finish(&e, placed ? syscall(SYS_pwritev2, fd, parts, count, at, 0, flags) : syscall(SYS_writev, fd, parts, count), size);
}

ssize_t writev(int fd, const struct iovec *parts, int count) { return written_parts("writev", fd, parts, count, 0, 0, 0); }
ssize_t pwritev(int fd, const struct iovec *parts, int count, off_t at) { return written_parts("pwritev", fd, parts, count, at, 1, 0); }
ssize_t pwritev64(int fd, const struct iovec *parts, int count, off64_t at) { return written_parts("pwritev", fd, parts, count, at, 1, 0); }
ssize_t pwritev2(int fd, const struct iovec *parts, int count, off_t at, int flags) { return written_parts("pwritev", fd, parts, count, at, 1, flags); }
ssize_t pwritev64v2(int fd, const struct iovec *parts, int count, off64_t at, int flags) { return written_parts("pwritev", fd, parts, count, at, 1, flags); }

ssize_t sendfile(int to, int from, off_t *at, size_t size) {
    struct effect e;
    on_descriptor(&e, to);
    e.writes = 1;
    int error = start(&e, "sendfile");
    if (error) return FAIL(&e, error);
    if (e.torn) size = size > 8192 ? 4096 : 1; /* callers ask for far more than there is */
    return finish(&e, syscall(SYS_sendfile, to, from, at, size), size);
}
ssize_t sendfile64(int to, int from, off64_t *at, size_t size) { return sendfile(to, from, at, size); }

ssize_t copy_file_range(int from, off64_t *there, int to, off64_t *here, size_t size, unsigned flags) {
    struct effect e;
    on_descriptor(&e, to);
    e.writes = 1;
    int error = start(&e, "copy_file_range");
    if (error) return FAIL(&e, error);
    if (e.torn) size = size > 8192 ? 4096 : 1;
    return finish(&e, syscall(SYS_copy_file_range, from, there, to, here, size, flags), size);
}

/* -- flushes ---------------------------------------------------------------------------------------------------------- */
static long on_file(int number, const char *kind, int fd, long a, long b, long c) {
    struct effect e;
    on_descriptor(&e, fd);
    int error = start(&e, kind);
    if (error) return FAIL(&e, error);
    return finish(&e, syscall(number, fd, a, b, c), 0);
}

int fsync(int fd) { return on_file(SYS_fsync, "fsync", fd, 0, 0, 0); }
int fdatasync(int fd) { return on_file(SYS_fdatasync, "fdatasync", fd, 0, 0, 0); }
int sync_file_range(int fd, off64_t at, off64_t size, unsigned flags) { return on_file(SYS_sync_file_range, "sync_file_range", fd, at, size, flags); }
int syncfs(int fd) { return on_file(SYS_syncfs, "syncfs", fd, 0, 0, 0); }

/* -- sizes ------------------------------------------------------------------------------------------------------------ */
int ftruncate(int fd, off_t size) { return on_file(SYS_ftruncate, "truncate", fd, size, 0, 0); }
int ftruncate64(int fd, off64_t size) { return on_file(SYS_ftruncate, "truncate", fd, size, 0, 0); }
int fallocate(int fd, int how, off_t at, off_t size) { return on_file(SYS_fallocate, "fallocate", fd, how, at, size); }
int fallocate64(int fd, int how, off64_t at, off64_t size) { return on_file(SYS_fallocate, "fallocate", fd, how, at, size); }
int posix_fallocate(int fd, off_t at, off_t size) { return on_file(SYS_fallocate, "fallocate", fd, 0, at, size) ? errno : 0; }
int posix_fallocate64(int fd, off64_t at, off64_t size) { return posix_fallocate(fd, at, size); }
int truncate(const char *name, off_t size) {
    struct effect e;
    on_path(&e, AT_FDCWD, name);
    int error = start(&e, "truncate");
    return error ? FAIL(&e, error) : finish(&e, syscall(SYS_truncate, name, size), 0);
}
int truncate64(const char *name, off64_t size) { return truncate(name, size); }

/* -- names ------------------------------------------------------------------------------------------------------------ */
static long opened(int folder, const char *name, int flags, int mode) {
    struct effect e;
    int changes = flags & (O_CREAT | O_TRUNC) && (flags & O_TMPFILE) != O_TMPFILE;
    if (!control || !control->armed || (!changes && flags & (O_DIRECTORY | O_PATH))) return syscall(SYS_openat, folder, name, flags, mode);
    on_path(&e, folder, name);
    int there = e.path[0] && inode(e.path);
    if (there && !(flags & O_TRUNC)) {
        note_open(&e);
        return syscall(SYS_openat, folder, name, flags, mode);
    }
    if (!there && !(flags & O_CREAT)) return syscall(SYS_openat, folder, name, flags, mode);
    int error = start(&e, there ? "truncate" : "create");
    return error ? FAIL(&e, error) : finish(&e, syscall(SYS_openat, folder, name, flags, mode), 0);
}

#define MODE(flags)                                     \
    int mode = 0;                                       \
    if ((flags) & O_CREAT || ((flags) & O_TMPFILE) == O_TMPFILE) { \
        va_list more;                                   \
        va_start(more, flags);                          \
        mode = va_arg(more, int);                       \
        va_end(more);                                   \
    }

int open(const char *name, int flags, ...) { MODE(flags) return opened(AT_FDCWD, name, flags, mode); }
int open64(const char *name, int flags, ...) { MODE(flags) return opened(AT_FDCWD, name, flags | O_LARGEFILE, mode); }
int openat(int folder, const char *name, int flags, ...) { MODE(flags) return opened(folder, name, flags, mode); }
int openat64(int folder, const char *name, int flags, ...) { MODE(flags) return opened(folder, name, flags | O_LARGEFILE, mode); }
int creat(const char *name, mode_t mode) { return opened(AT_FDCWD, name, O_CREAT | O_WRONLY | O_TRUNC, mode); }
int creat64(const char *name, mode_t mode) { return creat(name, mode); }

static long named(int number, const char *kind, int folder, const char *name, long a) {
    struct effect e;
    on_path(&e, folder, name);
    int error = start(&e, kind);
    return error ? FAIL(&e, error) : finish(&e, syscall(number, folder, name, a), 0);
}

int unlink(const char *name) { return named(SYS_unlinkat, "unlink", AT_FDCWD, name, 0); }
int rmdir(const char *name) { return named(SYS_unlinkat, "rmdir", AT_FDCWD, name, AT_REMOVEDIR); }
int unlinkat(int folder, const char *name, int flags) { return named(SYS_unlinkat, flags & AT_REMOVEDIR ? "rmdir" : "unlink", folder, name, flags); }
int remove(const char *name) {
    struct stat status;
    return !fstatat(AT_FDCWD, name, &status, AT_SYMLINK_NOFOLLOW) && S_ISDIR(status.st_mode) ? rmdir(name) : unlink(name);
}
int mkdir(const char *name, mode_t mode) { return named(SYS_mkdirat, "mkdir", AT_FDCWD, name, mode); }
int mkdirat(int folder, const char *name, mode_t mode) { return named(SYS_mkdirat, "mkdir", folder, name, mode); }

int renameat2(int folder, const char *name, int to, const char *new_name, unsigned flags) {
    struct effect e;
    on_path(&e, folder, name);
    and_path(&e, to, new_name);
    int error = start(&e, "rename");
    return error ? FAIL(&e, error) : finish(&e, syscall(SYS_renameat2, folder, name, to, new_name, flags), 0);
}
int renameat(int folder, const char *name, int to, const char *new_name) { return renameat2(folder, name, to, new_name, 0); }
int rename(const char *name, const char *new_name) { return renameat2(AT_FDCWD, name, AT_FDCWD, new_name, 0); }

int linkat(int folder, const char *name, int to, const char *new_name, int flags) {
    struct effect e;
    on_path(&e, to, new_name);
    and_path(&e, folder, name);
    int error = start(&e, "link");
    return error ? FAIL(&e, error) : finish(&e, syscall(SYS_linkat, folder, name, to, new_name, flags), 0);
}
int link(const char *name, const char *new_name) { return linkat(AT_FDCWD, name, AT_FDCWD, new_name, 0); }

int symlinkat(const char *target, int folder, const char *name) {
    struct effect e;
    on_path(&e, folder, name);
    int error = start(&e, "symlink");
    if (error) return FAIL(&e, error);
    if (e.counted) snprintf(e.other, PATHS, "%s", target);
    return finish(&e, syscall(SYS_symlinkat, target, folder, name), 0);
}
int symlink(const char *target, const char *name) { return symlinkat(target, AT_FDCWD, name); }

int mknodat(int folder, const char *name, mode_t mode, dev_t device) {
    struct effect e;
    on_path(&e, folder, name);
    int error = start(&e, "mknod");
    return error ? FAIL(&e, error) : finish(&e, syscall(SYS_mknodat, folder, name, mode, device), 0);
}
int mkfifo(const char *name, mode_t mode) { return mknodat(AT_FDCWD, name, mode | S_IFIFO, 0); }

static void *mapped(void *where, size_t size, int protection, int flags, int fd, off_t at) {
    struct effect e;
    if (fd >= 0 && flags & MAP_SHARED && protection & PROT_WRITE && control && control->armed && on_descriptor(&e, fd) && below(e.path)) {
        int error = start(&e, "mmap");
        if (error) return FAIL(&e, error), MAP_FAILED;
        void *found = (void *)syscall(SYS_mmap, where, size, protection, flags, fd, at);
        finish(&e, found == MAP_FAILED ? -1 : 0, size);
        return found;
    }
    return (void *)syscall(SYS_mmap, where, size, protection, flags, fd, at);
}
void *mmap(void *where, size_t size, int protection, int flags, int fd, off_t at) { return mapped(where, size, protection, flags, fd, at); }
void *mmap64(void *where, size_t size, int protection, int flags, int fd, off64_t at) { return mapped(where, size, protection, flags, fd, at); }

/* -- stdio ------------------------------------------------------------------------------------------------------------ */
#define NEXT(name)                  \
    static __typeof__(&name) next; \
    if (!next) next = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

static FILE *opened_stream(FILE *(*next)(const char *, const char *), const char *name, const char *how) {
    struct effect e;
    e.path[0] = 0;
    if (control && control->armed) on_path(&e, AT_FDCWD, name);
    int there = e.path[0] && inode(e.path);
    if (there && how[0] != 'w') note_open(&e);
    if (!e.path[0] || how[0] == 'r' || (there && how[0] == 'a')) return next(name, how);
    e.other[0] = e.writes = 0;
    int error = start(&e, there ? "truncate" : "create");
    if (error) return FAIL(&e, error), NULL;
    FILE *found = next(name, how);
    finish(&e, found ? 0 : -1, 0);
    return found;
}
FILE *fopen(const char *name, const char *how) { NEXT(fopen); return opened_stream(next, name, how); }
FILE *fopen64(const char *name, const char *how) { NEXT(fopen64); return opened_stream(next, name, how); }

static int of_stream(int (*next)(FILE *), FILE *stream) {
    struct effect e;
    int fd = stream ? fileno(stream) : -1;
    if (fd < 0 || !control || !control->armed || (fcntl(fd, F_GETFL) & O_ACCMODE) == O_RDONLY || !on_descriptor(&e, fd)) return next(stream);
    int error = start(&e, "write");
    if (error) return next(stream), FAIL(&e, error);
    return finish(&e, next(stream), 0);
}
int fclose(FILE *stream) { NEXT(fclose); return of_stream(next, stream); }
int fflush(FILE *stream) { NEXT(fflush); return of_stream(next, stream); }

/* -- programs that are started keep the shim, whatever environment they are given ------------------------------------------ */
static char **with_shim(char *const *given, char **room, int most) {
    int count = 0;
    for (; given && given[count]; count++) continue;
    if (!control || count + 3 > most) return (char **)given;
    int kept = 0;
    for (int i = 0; i < count; i++)
        if (strncmp(given[i], "LD_PRELOAD=", 11) && strncmp(given[i], "LD_SHIM_CONTROL=", 16)) room[kept++] = given[i];
    room[kept++] = own_preload;
    room[kept++] = own_control;
    room[kept] = NULL;
    return room;
}
#define ROOM char *room[2048]
extern char **environ;

/* A program's start counts as an effect at "(spawn)/PROGRAM": killed there, its caller never learns of it. Its line is written before. */
static int spawned(const char *name) {
    struct effect e;
    e.path[0] = e.other[0] = e.writes = 0;
    if (control && control->armed && !access(name, X_OK)) {
        const char *slash = strrchr(name, '/');
        snprintf(e.path, PATHS, "%.900s/(spawn)/%.100s", control->root, slash ? slash + 1 : name);
    }
    int error = start(&e, "spawn");
    if (error) return FAIL(&e, error), error;
    finish(&e, 0, 0);
    return 0;
}

int execve(const char *name, char *const words[], char *const given[]) {
    ROOM;
    return spawned(name) ? -1 : syscall(SYS_execve, name, words, with_shim(given, room, 2048));
}
int execv(const char *name, char *const words[]) { return execve(name, words, environ); }
int execvpe(const char *name, char *const words[], char *const given[]) {
    NEXT(execvpe);
    ROOM;
    return next(name, words, with_shim(given, room, 2048));
}
int execvp(const char *name, char *const words[]) { return execvpe(name, words, environ); }
int posix_spawn(pid_t *pid, const char *name, const posix_spawn_file_actions_t *actions, const posix_spawnattr_t *how, char *const words[], char *const given[]) {
    NEXT(posix_spawn);
    ROOM;
    int error = spawned(name);
    return error ? error : next(pid, name, actions, how, words, with_shim(given, room, 2048));
}
int posix_spawnp(pid_t *pid, const char *name, const posix_spawn_file_actions_t *actions, const posix_spawnattr_t *how, char *const words[], char *const given[]) {
    NEXT(posix_spawnp);
    ROOM;
    return next(pid, name, actions, how, words, with_shim(given, room, 2048));
}
