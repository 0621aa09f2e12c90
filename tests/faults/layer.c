/* A file layer between a process and the kernel, loaded with LD_PRELOAD. Of files under FAULT_DIR it
   - appends every write, truncation and sync that succeeded to FAULT_TRACE, with its bytes (see layer.py for the record);
   - fails or delays calls while a file of that name lies in FAULT_CONTROL:
       sync   fsync, fdatasync and msync fail with EIO ("once" in it: the first one only)
       write  writes fail with EIO          space  writes fail with ENOSPC
       grow   writes behind the byte count in it fail with ENOSPC
       ro     opening for writing and writing fail with EROFS
       clock  the wall clock is so many seconds ahead
       slow   every write and sync takes so many milliseconds longer                                                     */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

static char dir[PATH_MAX], control[PATH_MAX];
static size_t dir_len;
static int trace = -1;

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

__attribute__((constructor)) static void start(void) {
  const char *d = getenv("FAULT_DIR"), *c = getenv("FAULT_CONTROL"), *t = getenv("FAULT_TRACE");
  if (d) dir_len = strlen(strcpy(dir, d));
  if (c) strcpy(control, c);
  if (t && *t) trace = syscall(SYS_openat, AT_FDCWD, t, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
}

/* Path of a file under FAULT_DIR, relative to it; NULL for any other. */
static const char *inside(const char *path) {
  return dir_len && !strncmp(path, dir, dir_len) && (path[dir_len] == '/' || !path[dir_len]) ? path + dir_len : NULL;
}

static const char *name_of(int fd, char *buffer) {
  char link[64];
  if (!dir_len || fd == trace) return NULL;
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  ssize_t n = readlink(link, buffer, PATH_MAX - 1);
  if (n < 0) return NULL;
  buffer[n] = 0;
  return inside(buffer);
}

/* Whether a control file is there; its text goes to `text`. */
static int controlled(const char *what, char *text) {
  char path[PATH_MAX + 16];
  if (!*control) return 0;
  snprintf(path, sizeof path, "%s/%s", control, what);
  int fd = syscall(SYS_openat, AT_FDCWD, path, O_RDONLY | O_CLOEXEC, 0);
  if (fd < 0) return 0;
  ssize_t n = read(fd, text, 31);
  text[n > 0 ? n : 0] = 0;
  close(fd);
  if (!strncmp(text, "once", 4)) unlink(path);
  return 1;
}

static int refused(const char *name, int is_sync, off_t end) {
  char text[32];
  if (!name) return 0;
  if (controlled("slow", text)) usleep(1000 * atoi(text));
  if (is_sync) return controlled("sync", text) ? EIO : 0;
  if (controlled("write", text)) return EIO;
  if (controlled("space", text)) return ENOSPC;
  if (controlled("ro", text)) return EROFS;
  if (controlled("grow", text) && end > atoll(text)) return ENOSPC;
  return 0;
}

static void record(char op, const char *name, off_t offset, const struct iovec *parts, int count, size_t size) {
  if (trace < 0 || !name) return;
  struct { uint32_t op, name_bytes; uint64_t offset, bytes; } head = {op, strlen(name), offset, size};
  struct iovec all[count + 2];
  all[0] = (struct iovec){&head, sizeof head};
  all[1] = (struct iovec){(void *)name, head.name_bytes};
  for (int i = 0; i < count; i++) {
    all[i + 2] = parts[i];
    if (all[i + 2].iov_len > size) all[i + 2].iov_len = size;
    size -= all[i + 2].iov_len;
  }
  syscall(SYS_writev, trace, all, count + 2);
}

#define FAIL(error) do { errno = error; return -1; } while (0)

static ssize_t written(int fd, const struct iovec *parts, int count, off_t offset, int at_offset) {
  char buffer[PATH_MAX];
  const char *name = name_of(fd, buffer);
  size_t size = 0;
  for (int i = 0; i < count; i++) size += parts[i].iov_len;
  if (name && !at_offset) offset = (fcntl(fd, F_GETFL) & O_APPEND) ? lseek(fd, 0, SEEK_END) : lseek(fd, 0, SEEK_CUR);
  int error = refused(name, 0, offset + size);
  if (error) FAIL(error);
  ssize_t done = at_offset ? syscall(SYS_pwritev, fd, parts, count, offset, 0) : syscall(SYS_writev, fd, parts, count);
  if (done > 0) record('W', name, offset, parts, count, done);
  return done;
}

ssize_t write(int fd, const void *data, size_t size) {
  struct iovec part = {(void *)data, size};
  return written(fd, &part, 1, 0, 0);
}
ssize_t writev(int fd, const struct iovec *parts, int count) { return written(fd, parts, count, 0, 0); }
ssize_t pwrite(int fd, const void *data, size_t size, off_t offset) {
  struct iovec part = {(void *)data, size};
  return written(fd, &part, 1, offset, 1);
}
ssize_t pwrite64(int fd, const void *data, size_t size, off_t offset) { return pwrite(fd, data, size, offset); }
ssize_t pwritev(int fd, const struct iovec *parts, int count, off_t offset) { return written(fd, parts, count, offset, 1); }

static int synced(int fd, long call) {
  char buffer[PATH_MAX];
  const char *name = name_of(fd, buffer);
  int error = refused(name, 1, 0);
  if (error) FAIL(error);
  int done = syscall(call, fd);
  if (!done) record('S', name, 0, NULL, 0, 0);
  return done;
}
int fsync(int fd) { return synced(fd, SYS_fsync); }
int fdatasync(int fd) { return synced(fd, SYS_fdatasync); }

int ftruncate(int fd, off_t size) {
  char buffer[PATH_MAX];
  const char *name = name_of(fd, buffer);
  int error = refused(name, 0, size);
  if (error) FAIL(error);
  int done = syscall(SYS_ftruncate, fd, size);
  if (!done) record('T', name, size, NULL, 0, 0);
  return done;
}
int ftruncate64(int fd, off_t size) { return ftruncate(fd, size); }

int open(const char *path, int flags, ...) {
  va_list more;
  va_start(more, flags);
  int mode = (flags & (O_CREAT | O_TMPFILE)) ? va_arg(more, int) : 0;
  va_end(more);
  char text[32];
  if ((flags & O_ACCMODE) != O_RDONLY && inside(path) && controlled("ro", text)) FAIL(EROFS);
  return syscall(SYS_openat, AT_FDCWD, path, flags, mode);
}
int open64(const char *path, int flags, ...) {
  va_list more;
  va_start(more, flags);
  int mode = (flags & (O_CREAT | O_TMPFILE)) ? va_arg(more, int) : 0;
  va_end(more);
  return open(path, flags, mode);
}

int rename(const char *from, const char *to) {
  char text[32];
  const char *name = inside(to);
  if (name && controlled("ro", text)) FAIL(EROFS);
  int done = syscall(SYS_rename, from, to);
  if (!done && name && inside(from)) {
    struct iovec part = {(void *)inside(from), strlen(inside(from))};
    record('R', name, 0, &part, 1, part.iov_len);
  }
  return done;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
  char text[32];
  int done = syscall(SYS_clock_gettime, clock, now);
  if (clock == CLOCK_REALTIME && controlled("clock", text)) now->tv_sec += atoll(text);
  return done;
}
