/* Preloaded into a process: from the n-th write to a regular file on, the disk is full. Creating
   and renaming files count as writes. faults_disk_full_at(0) ends it. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

static long left = -1;
static long seen = 0;

void faults_disk_full_at(long n) { left = n; seen = 0; }
long faults_writes(void) { return seen; }

static int full(int fd) {
    struct stat found;
    if (fd >= 0 && (fstat(fd, &found) != 0 || !S_ISREG(found.st_mode))) return 0;
    seen++;
    if (left > 0 && seen >= left) { errno = ENOSPC; return 1; }
    return 0;
}

#define REAL(type, name, ...) ((type(*)(__VA_ARGS__))dlsym(RTLD_NEXT, name))

ssize_t write(int fd, const void *data, size_t n) {
    return full(fd) ? -1 : REAL(ssize_t, "write", int, const void *, size_t)(fd, data, n);
}
ssize_t pwrite64(int fd, const void *data, size_t n, off64_t at) {
    return full(fd) ? -1
                    : REAL(ssize_t, "pwrite64", int, const void *, size_t, off64_t)(fd, data, n, at);
}
ssize_t writev(int fd, const struct iovec *parts, int n) {
    return full(fd) ? -1 : REAL(ssize_t, "writev", int, const struct iovec *, int)(fd, parts, n);
}
int fsync(int fd) { return full(fd) ? -1 : REAL(int, "fsync", int)(fd); }
int ftruncate64(int fd, off64_t n) {
    return full(fd) ? -1 : REAL(int, "ftruncate64", int, off64_t)(fd, n);
}
int mkdir(const char *path, mode_t mode) {
    return full(-1) ? -1 : REAL(int, "mkdir", const char *, mode_t)(path, mode);
}
int rename(const char *from, const char *to) {
    return full(-1) ? -1 : REAL(int, "rename", const char *, const char *)(from, to);
}
