/* Loaded before libc: what a power loss would leave of the files under POWER_LOSS_UNDER.

   A file that is flushed is copied to NAME.durable, whole or not at all; the copy goes where the file is renamed to
   and with it when it is removed. It is read through the descriptor that was flushed: closing another one of the same
   file would drop the locks that SQLite holds on it. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static char *durable(const char *path, char *name, const char *tail) {
    const char *under = getenv("POWER_LOSS_UNDER");
    if (!under || strncmp(path, under, strlen(under)) != 0) return NULL;
    return snprintf(name, PATH_MAX, "%s.durable%s", path, tail) < PATH_MAX ? name : NULL;
}

static void keep(int file) {
    char link[64], path[PATH_MAX], half[PATH_MAX], whole[PATH_MAX], buffer[1 << 16];
    struct stat found;
    if (fstat(file, &found) || !S_ISREG(found.st_mode)) return;
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length <= 0) return;
    path[length] = 0;
    if (!durable(path, half, ".half") || !durable(path, whole, "")) return;
    int copy = open(half, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    if (copy < 0) abort();
    off_t at = 0;
    ssize_t got;
    while ((got = pread(file, buffer, sizeof buffer, at)) > 0) {
        if (write(copy, buffer, got) != got) abort();
        at += got;
    }
    close(copy);
    int (*real_rename)(const char *, const char *) = dlsym(RTLD_NEXT, "rename");
    if (got < 0 || real_rename(half, whole)) abort();
}

int fsync(int file) {
    int (*real)(int) = dlsym(RTLD_NEXT, "fsync");
    int result = real(file);
    if (result == 0) keep(file);
    return result;
}

int fdatasync(int file) {
    int (*real)(int) = dlsym(RTLD_NEXT, "fdatasync");
    int result = real(file);
    if (result == 0) keep(file);
    return result;
}

int rename(const char *from, const char *to) {
    int (*real)(const char *, const char *) = dlsym(RTLD_NEXT, "rename");
    char old[PATH_MAX], new[PATH_MAX];
    int result = real(from, to);
    if (result == 0 && durable(from, old, "") && durable(to, new, "")) real(old, new);
    return result;
}

int unlink(const char *path) {
    int (*real)(const char *) = dlsym(RTLD_NEXT, "unlink");
    char copy[PATH_MAX];
    int result = real(path);
    if (result == 0 && durable(path, copy, "")) real(copy);
    return result;
}
