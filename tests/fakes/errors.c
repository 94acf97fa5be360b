/* Makes calls on files below some directories fail, as a faulty disk or a full table of files does.

   LD_PRELOAD loads this library into one process and its forks, but not into programs that these
   start. ERRORS_BELOW is a directory. ERRORS_LIVE is the beginning of the paths of other
   directories; a file in these is named live/NAME. ERRORS_CONTROL is a file with a `struct control`,
   which says which calls fail, and counts them; it is written only while it is not armed.
   ERRORS_RECORD is a file that gets a line for each call while the control is armed: the name of
   the call, a tab, the file. */

#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <fnmatch.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

struct control {
    int armed;
    int seen, failed;     /* matching calls, and those of them that failed */
    int number, at;       /* the errno, 0 for none, and the first call that fails, from 1;
                             HANGS: while armed, all calls wait, except those on live files;
                             SHORT: half of a write is done, and the next write gets ENOSPC */
    int lasting;          /* later matching calls fail too */
    char call[32], file[256]; /* the name of matching calls, and a pattern of their files */
};
static volatile struct control *control;
enum { HANGS = -1, SHORT = -2 };
static char below[PATH_MAX], live[PATH_MAX];
static int record = -1;

static void copy(char *to, size_t size, const char *variable)
{
    const char *value = getenv(variable);
    snprintf(to, size, "%s", value ? value : "");
}

__attribute__((constructor)) static void begin(void)
{
    char path[PATH_MAX];
    copy(below, sizeof below, "ERRORS_BELOW");
    copy(live, sizeof live, "ERRORS_LIVE");
    copy(path, sizeof path, "ERRORS_CONTROL");
    int fd = syscall(SYS_openat, AT_FDCWD, path, O_RDWR | O_CLOEXEC, 0);
    if (fd >= 0) {
        void *found = mmap(NULL, sizeof *control, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        control = found == MAP_FAILED ? NULL : found;
        syscall(SYS_close, fd);
    }
    copy(path, sizeof path, "ERRORS_RECORD");
    if (*path)
        record = syscall(SYS_openat, AT_FDCWD, path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
    unsetenv("LD_PRELOAD");
}

/* Returns the name of a file for the record, or NULL for a file outside the directories. */
static const char *named(const char *path, char *name, size_t size)
{
    size_t length = strlen(below);
    if (length && !strncmp(path, below, length) && (path[length] == '/' || !path[length])) {
        snprintf(name, size, "%s", path[length] ? path + length + 1 : ".");
        return name;
    }
    length = strlen(live);
    const char *base = strrchr(live, '/');
    if (!length || !base)
        return NULL;
    size_t folder = base + 1 - live;
    if (strncmp(path, live, folder))
        return NULL;
    const char *rest = path + folder + (path[folder] == '.'); /* a directory that is not ready has a dot */
    if (strncmp(rest, base + 1, length - folder))
        return NULL;
    rest = strchr(rest, '/');
    snprintf(name, size, "live%s", rest ? rest : "");
    return name;
}

/* Returns whether this call on this path must fail (errno is then set) or, with SHORT, write half. */
static int fails(const char *which, const char *path)
{
    char name[PATH_MAX];
    if (!control || !__atomic_load_n(&control->armed, __ATOMIC_ACQUIRE))
        return 0;
    int before = errno;
    if (!named(path, name, sizeof name))
        return errno = before, 0;
    char *deleted = strstr(name, " (deleted)");
    if (deleted)
        *deleted = 0;
    if (record >= 0) {
        char line[PATH_MAX + 32];
        int size = snprintf(line, sizeof line, "%s\t%s\n", which, name);
        syscall(SYS_write, record, line, size);
    }
    while (control->number == HANGS && control->armed && strncmp(name, "live", 4))
        usleep(10000);
    errno = before;
    if (!control->number || control->number == HANGS || strcmp(which, (char *)control->call) ||
        fnmatch((char *)control->file, name, FNM_PATHNAME))
        return 0;
    int seen = __atomic_add_fetch(&control->seen, 1, __ATOMIC_SEQ_CST);
    int is_after = control->number == SHORT && seen == control->at + 1;
    if (seen != control->at && !is_after && !(control->lasting && seen > control->at))
        return 0;
    __atomic_add_fetch(&control->failed, 1, __ATOMIC_SEQ_CST);
    if (control->number == SHORT && seen == control->at)
        return SHORT;
    errno = control->number == SHORT ? ENOSPC : control->number;
    return 1;
}

static int fails_fd(const char *which, int fd)
{
    char link[64], path[PATH_MAX];
    if (fd < 0 || !control || !control->armed)
        return 0;
    int before = errno;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    long size = syscall(SYS_readlinkat, AT_FDCWD, link, path, sizeof path - 1);
    errno = before;
    if (size <= 0)
        return 0;
    path[size] = 0;
    return fails(which, path);
}

static int fails_at(const char *which, int fd, const char *path)
{
    char link[64], full[2 * PATH_MAX];
    if (!path || *path == '/' || fd == AT_FDCWD)
        return path && fails(which, path);
    if (!control || !control->armed)
        return 0;
    int before = errno;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    long size = syscall(SYS_readlinkat, AT_FDCWD, link, full, PATH_MAX - 1);
    errno = before;
    if (size <= 0)
        return 0;
    snprintf(full + size, sizeof full - size, "/%s", path);
    return fails(which, full);
}

#define REAL(name) \
    static __typeof__(name) *real; \
    if (!real) \
        real = (__typeof__(name) *)dlsym(RTLD_NEXT, #name)

/* Defines a wrapper: its type, name, parameters and arguments, when it fails, what it returns. */
#define WRAP(type, name, parameters, arguments, failing, result) \
    type name parameters \
    { \
        REAL(name); \
        if (failing) \
            return result; \
        return real arguments; \
    }

#define OPENER(name, place, parameters, arguments) \
    int name parameters \
    { \
        va_list more; \
        va_start(more, flags); \
        int mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(more, int) : 0; \
        va_end(more); \
        REAL(name); \
        return fails_at(flags & O_CREAT ? "create" : "open", place, path) ? -1 : real arguments; \
    }

OPENER(open, AT_FDCWD, (const char *path, int flags, ...), (path, flags, mode))
OPENER(open64, AT_FDCWD, (const char *path, int flags, ...), (path, flags, mode))
OPENER(openat, fd, (int fd, const char *path, int flags, ...), (fd, path, flags, mode))
OPENER(openat64, fd, (int fd, const char *path, int flags, ...), (fd, path, flags, mode))

WRAP(ssize_t, read, (int fd, void *data, size_t size), (fd, data, size), fails_fd("read", fd), -1)
WRAP(ssize_t, pread, (int fd, void *data, size_t size, off_t from), (fd, data, size, from),
     fails_fd("read", fd), -1)
WRAP(ssize_t, pread64, (int fd, void *data, size_t size, off64_t from), (fd, data, size, from),
     fails_fd("read", fd), -1)
WRAP(ssize_t, readv, (int fd, const struct iovec *parts, int count), (fd, parts, count),
     fails_fd("read", fd), -1)
#define WRITER(name, parameters, arguments) \
    ssize_t name parameters \
    { \
        REAL(name); \
        int failing = fails_fd("write", fd); \
        if (failing == 1) \
            return -1; \
        size = failing == SHORT ? (size + 1) / 2 : size; \
        return real arguments; \
    }

WRITER(write, (int fd, const void *data, size_t size), (fd, data, size))
WRITER(pwrite, (int fd, const void *data, size_t size, off_t from), (fd, data, size, from))
WRITER(pwrite64, (int fd, const void *data, size_t size, off64_t from), (fd, data, size, from))
WRAP(ssize_t, writev, (int fd, const struct iovec *parts, int count), (fd, parts, count),
     fails_fd("write", fd), -1)
WRAP(ssize_t, sendfile64, (int out, int in, off64_t *from, size_t size), (out, in, from, size),
     fails_fd("send", out), -1)
WRAP(int, fsync, (int fd), (fd), fails_fd("sync", fd), -1)
WRAP(int, fdatasync, (int fd), (fd), fails_fd("sync", fd), -1)
WRAP(int, ftruncate, (int fd, off_t size), (fd, size), fails_fd("truncate", fd), -1)
WRAP(int, ftruncate64, (int fd, off64_t size), (fd, size), fails_fd("truncate", fd), -1)
WRAP(int, posix_fallocate64, (int fd, off64_t from, off64_t size), (fd, from, size),
     fails_fd("allocate", fd), errno)
WRAP(void *, mmap64, (void *to, size_t size, int rights, int flags, int fd, off64_t from),
     (to, size, rights, flags, fd, from), fails_fd("map", fd), MAP_FAILED)

WRAP(int, stat, (const char *path, struct stat *told), (path, told), fails("stat", path), -1)
WRAP(int, stat64, (const char *path, struct stat64 *told), (path, told), fails("stat", path), -1)
WRAP(int, lstat, (const char *path, struct stat *told), (path, told), fails("stat", path), -1)
WRAP(int, lstat64, (const char *path, struct stat64 *told), (path, told), fails("stat", path), -1)
WRAP(int, fstatat64, (int fd, const char *path, struct stat64 *told, int flags),
     (fd, path, told, flags), fails_at("stat", fd, path), -1)
WRAP(int, fstat, (int fd, struct stat *told), (fd, told), fails_fd("fstat", fd), -1)
WRAP(int, fstat64, (int fd, struct stat64 *told), (fd, told), fails_fd("fstat", fd), -1)
WRAP(int, statvfs64, (const char *path, struct statvfs64 *told), (path, told),
     fails("statvfs", path), -1)
WRAP(int, fstatvfs64, (int fd, struct statvfs64 *told), (fd, told), fails_fd("statvfs", fd), -1)
WRAP(int, access, (const char *path, int mode), (path, mode), fails("access", path), -1)
WRAP(int, faccessat, (int fd, const char *path, int mode, int flags), (fd, path, mode, flags),
     fails_at("access", fd, path), -1)

WRAP(int, rename, (const char *from, const char *to), (from, to), fails("rename", to), -1)
WRAP(int, renameat, (int old, const char *from, int fd, const char *to), (old, from, fd, to),
     fails_at("rename", fd, to), -1)
WRAP(int, unlink, (const char *path), (path), fails("unlink", path), -1)
WRAP(int, unlinkat, (int fd, const char *path, int flags), (fd, path, flags),
     fails_at("unlink", fd, path), -1)
WRAP(int, rmdir, (const char *path), (path), fails("unlink", path), -1)
WRAP(int, mkdir, (const char *path, mode_t mode), (path, mode), fails("mkdir", path), -1)
WRAP(int, mkdirat, (int fd, const char *path, mode_t mode), (fd, path, mode),
     fails_at("mkdir", fd, path), -1)
WRAP(int, utimensat, (int fd, const char *path, const struct timespec times[2], int flags),
     (fd, path, times, flags), path ? fails_at("utime", fd, path) : fails_fd("utime", fd), -1)
WRAP(int, futimens, (int fd, const struct timespec times[2]), (fd, times), fails_fd("utime", fd),
     -1)
WRAP(int, chmod, (const char *path, mode_t mode), (path, mode), fails("chmod", path), -1)
WRAP(int, fchmod, (int fd, mode_t mode), (fd, mode), fails_fd("chmod", fd), -1)

WRAP(DIR *, opendir, (const char *path), (path), fails("list", path), NULL)
WRAP(DIR *, fdopendir, (int fd), (fd), fails_fd("list", fd), NULL)
WRAP(struct dirent64 *, readdir64, (DIR *folder), (folder), fails_fd("readdir", dirfd(folder)),
     NULL)
