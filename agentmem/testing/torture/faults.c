/* A library for LD_PRELOAD that stands between a process and the files of one directory.
 *
 * It writes down every write and sync, fails the n-th call of a kind or dies of it, pretends that the disk is full, and
 * lets clocks jump. The process tells it what to do through the functions at the end, called with ctypes (shim.py).
 * Files outside the directory, and a process that never calls `faults_watch`, are left alone. lock.mdb is mapped and
 * not written: nothing here sees it.
 *
 * A line of the journal, native byte order (journal.py reads it):
 *   0  4  event, a value of `enum event`
 *   4  4  number of bytes of the name
 *   8  8  inode of the file; for MARK: its number
 *  16  8  offset of a write; length of a truncated file
 *  24  8  number of bytes of the data
 *  32  n  name, relative to the directory, then the data: bytes written, or the new name of a rename
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum event { WRITE = 1, DURABLE_WRITE, SYNC, TRUNCATE, CREATE, RENAME, UNLINK, MARK };
enum call { CALL_WRITE = 1, CALL_SYNC = 2, CALL_STATVFS = 4, CALL_MMAP = 8, CALL_TRUNCATE = 16, CALL_OPEN = 32 };

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static char root[PATH_MAX];
static size_t root_length;
static int journal = -1;

static int failing_calls, failing_error, is_persistent, is_short;
static long num_until_failure, num_seen, num_failed;
static long num_left = -1; /* bytes that files may still grow by; -1: no limit */
static int is_told;        /* statvfs says so too */

#define REAL(name) ((__typeof__(&name))real(#name))

static void *real(const char *name) { return dlsym(RTLD_NEXT, name); }

/* The name of the file `fd` inside the directory, "" for the directory itself; NULL for any other. */
static const char *watched(int fd, char *path) {
  char link[64];
  if (!root_length) return NULL;
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  ssize_t length = readlink(link, path, PATH_MAX - 1);
  if (length < (ssize_t)root_length || memcmp(path, root, root_length)) return NULL;
  path[length] = 0;
  if (!path[root_length]) return path + root_length;
  return path[root_length] == '/' ? path + root_length + 1 : NULL;
}

/* The name of `path` inside the directory; NULL for any other. Every path of ours is absolute. */
static const char *inside(const char *path) {
  if (!root_length || strncmp(path, root, root_length) || path[root_length] != '/') return NULL;
  return path + root_length + 1;
}

static uint64_t inode(int fd) {
  struct stat status;
  return fstat(fd, &status) ? 0 : status.st_ino;
}

static void note(enum event event, const char *name, uint64_t id, uint64_t offset, const void *data, size_t length) {
  struct {
    uint32_t event, name_length;
    uint64_t id, offset, length;
  } head = {event, (uint32_t)strlen(name), id, offset, length};
  struct iovec parts[3] = {{&head, sizeof head}, {(void *)name, head.name_length}, {(void *)data, length}};
  if (journal < 0) return;
  if (syscall(SYS_writev, journal, parts, 3) != (long)(sizeof head + head.name_length + length)) abort();
}

/* Whether this call fails; errno is set. The mutex is held. */
static int fails(enum call call) {
  if (!(failing_calls & call)) return 0;
  num_seen++;
  if (num_seen != num_until_failure && !(is_persistent && num_seen > num_until_failure)) return 0;
  num_failed++;
  if (failing_error < 0) kill(getpid(), SIGKILL);
  errno = failing_error;
  return 1;
}

/* How many of `length` bytes at `offset` fit on the disk; 0 with errno set when none do. The mutex is held. */
static size_t fitting(int fd, size_t length, off_t offset) {
  struct stat status;
  if (num_left < 0 || fstat(fd, &status)) return length;
  off_t end = offset + (off_t)length;
  long growth = end > status.st_size ? (long)(end - status.st_size) : 0;
  if (growth > num_left) {
    if (growth - num_left >= (long)length) {
      errno = ENOSPC;
      num_failed++;
      return 0;
    }
    length -= (size_t)(growth - num_left);
    growth = num_left;
  }
  num_left -= growth;
  return length;
}

static ssize_t write_at(int fd, const void *data, size_t length, off_t offset, int is_positioned) {
  char path[PATH_MAX];
  const char *name = watched(fd, path);
  if (!name) {
    return is_positioned ? syscall(SYS_pwrite64, fd, data, length, offset) : syscall(SYS_write, fd, data, length);
  }
  pthread_mutex_lock(&mutex);
  ssize_t written = -1;
  int is_failing = fails(CALL_WRITE), flags = fcntl(fd, F_GETFL);
  if (!is_positioned) offset = flags & O_APPEND ? lseek(fd, 0, SEEK_END) : lseek(fd, 0, SEEK_CUR);
  size_t allowed = is_failing ? (is_short ? length / 2 : 0) : fitting(fd, length, offset);
  if (allowed) {
    written = is_positioned ? syscall(SYS_pwrite64, fd, data, allowed, offset) : syscall(SYS_write, fd, data, allowed);
    if (written > 0) note(flags & O_DSYNC ? DURABLE_WRITE : WRITE, name, inode(fd), offset, data, written);
  }
  pthread_mutex_unlock(&mutex);
  return written;
}

ssize_t write(int fd, const void *data, size_t length) { return write_at(fd, data, length, 0, 0); }
ssize_t pwrite(int fd, const void *data, size_t length, off_t offset) { return write_at(fd, data, length, offset, 1); }
ssize_t pwrite64(int fd, const void *data, size_t length, off_t offset) { return write_at(fd, data, length, offset, 1); }

static ssize_t write_all(int fd, const struct iovec *parts, int num_parts, off_t offset, int is_positioned) {
  char path[PATH_MAX];
  size_t length = 0, done = 0;
  for (int i = 0; i < num_parts; i++) length += parts[i].iov_len;
  if (!watched(fd, path)) {
    return is_positioned ? REAL(pwritev)(fd, parts, num_parts, offset) : syscall(SYS_writev, fd, parts, num_parts);
  }
  char *joined = malloc(length ? length : 1);
  if (!joined) abort();
  for (int i = 0; i < num_parts; done += parts[i++].iov_len) memcpy(joined + done, parts[i].iov_base, parts[i].iov_len);
  ssize_t written = write_at(fd, joined, length, offset, is_positioned);
  int error = errno;
  free(joined);
  errno = error;
  return written;
}

ssize_t writev(int fd, const struct iovec *parts, int num_parts) { return write_all(fd, parts, num_parts, 0, 0); }
ssize_t pwritev(int fd, const struct iovec *parts, int n, off_t offset) { return write_all(fd, parts, n, offset, 1); }
ssize_t pwritev64(int fd, const struct iovec *parts, int n, off_t offset) { return write_all(fd, parts, n, offset, 1); }

static int sync_file(int fd, long number) {
  char path[PATH_MAX];
  const char *name = watched(fd, path);
  if (!name) return (int)syscall(number, fd);
  pthread_mutex_lock(&mutex);
  int result = fails(CALL_SYNC) ? -1 : (int)syscall(number, fd);
  if (!result) note(SYNC, name, inode(fd), 0, "", 0);
  pthread_mutex_unlock(&mutex);
  return result;
}

int fsync(int fd) { return sync_file(fd, SYS_fsync); }
int fdatasync(int fd) { return sync_file(fd, SYS_fdatasync); }

int ftruncate(int fd, off_t length) {
  char path[PATH_MAX];
  const char *name = watched(fd, path);
  if (!name) return (int)syscall(SYS_ftruncate, fd, length);
  pthread_mutex_lock(&mutex);
  int result = fails(CALL_TRUNCATE) ? -1 : (int)syscall(SYS_ftruncate, fd, length);
  if (!result) note(TRUNCATE, name, inode(fd), length, "", 0);
  pthread_mutex_unlock(&mutex);
  return result;
}
int ftruncate64(int fd, off_t length) { return ftruncate(fd, length); }

int truncate(const char *path, off_t length) {
  int fd = REAL(open)(path, O_WRONLY | O_CLOEXEC);
  if (fd < 0) return -1;
  int result = ftruncate(fd, length), error = errno;
  close(fd);
  errno = error;
  return result;
}
int truncate64(const char *path, off_t length) { return truncate(path, length); }

int posix_fallocate(int fd, off_t offset, off_t length) {
  char path[PATH_MAX];
  if (!watched(fd, path)) return REAL(posix_fallocate)(fd, offset, length);
  pthread_mutex_lock(&mutex);
  int before = errno, result = fails(CALL_TRUNCATE) ? errno : num_left >= 0 && length > num_left ? ENOSPC : 0;
  errno = before;
  pthread_mutex_unlock(&mutex);
  return result ? result : REAL(posix_fallocate)(fd, offset, length);
}
int posix_fallocate64(int fd, off_t offset, off_t length) { return posix_fallocate(fd, offset, length); }

int statvfs(const char *path, struct statvfs *out) {
  int is_ours = root_length && !strncmp(path, root, root_length);
  pthread_mutex_lock(&mutex);
  int is_failing = is_ours && fails(CALL_STATVFS);
  int result = is_failing ? -1 : REAL(statvfs)(path, out);
  if (!result && is_ours && num_left >= 0 && is_told) out->f_bavail = out->f_bfree = (fsblkcnt_t)num_left / out->f_frsize;
  pthread_mutex_unlock(&mutex);
  return result;
}
int statvfs64(const char *path, struct statvfs64 *out) { return statvfs(path, (struct statvfs *)out); }

void *mmap(void *address, size_t length, int protection, int flags, int fd, off_t offset) {
  char path[PATH_MAX];
  int is_failing = 0;
  if (fd >= 0 && watched(fd, path)) {
    pthread_mutex_lock(&mutex);
    is_failing = fails(CALL_MMAP);
    pthread_mutex_unlock(&mutex);
  }
  return is_failing ? MAP_FAILED : (void *)syscall(SYS_mmap, address, length, protection, flags, fd, offset);
}
void *mmap64(void *a, size_t l, int p, int f, int fd, off_t o) { return mmap(a, l, p, f, fd, o); }

static int open_file(int folder, const char *path, int flags, mode_t mode) {
  char found[PATH_MAX];
  const char *name = inside(path);
  if (!name) return (int)syscall(SYS_openat, folder, path, flags, mode);
  pthread_mutex_lock(&mutex);
  int fd = fails(CALL_OPEN) ? -1 : (int)syscall(SYS_openat, folder, path, flags, mode);
  if (fd >= 0 && flags & O_CREAT && (name = watched(fd, found))) note(CREATE, name, inode(fd), 0, "", 0);
  if (fd >= 0 && flags & O_TRUNC && (name = watched(fd, found))) note(TRUNCATE, name, inode(fd), 0, "", 0);
  pthread_mutex_unlock(&mutex);
  return fd;
}

#define MODE_OF(flags, mode)                                    \
  mode_t mode = 0;                                              \
  if ((flags) & (O_CREAT | O_TMPFILE)) {                        \
    va_list arguments;                                          \
    va_start(arguments, flags);                                 \
    mode = (mode_t)va_arg(arguments, int);                      \
    va_end(arguments);                                          \
  }

int open(const char *path, int flags, ...) {
  MODE_OF(flags, mode)
  return open_file(AT_FDCWD, path, flags, mode);
}
int open64(const char *path, int flags, ...) {
  MODE_OF(flags, mode)
  return open_file(AT_FDCWD, path, flags | O_LARGEFILE, mode);
}
int openat(int folder, const char *path, int flags, ...) {
  MODE_OF(flags, mode)
  return open_file(folder, path, flags, mode);
}
int openat64(int folder, const char *path, int flags, ...) {
  MODE_OF(flags, mode)
  return open_file(folder, path, flags | O_LARGEFILE, mode);
}

int rename(const char *old, const char *new) {
  const char *from = inside(old), *to = inside(new);
  pthread_mutex_lock(&mutex);
  int result = REAL(rename)(old, new);
  if (!result && from && to) note(RENAME, from, 0, 0, to, strlen(to));
  pthread_mutex_unlock(&mutex);
  return result;
}

int unlink(const char *path) {
  const char *name = inside(path);
  pthread_mutex_lock(&mutex);
  int result = REAL(unlink)(path);
  if (!result && name) note(UNLINK, name, 0, 0, "", 0);
  pthread_mutex_unlock(&mutex);
  return result;
}

/* A child forked while another thread held the mutex would wait for it for ever. */
static void hold(void) { pthread_mutex_lock(&mutex); }
static void let_go(void) { pthread_mutex_unlock(&mutex); }
__attribute__((constructor)) static void guard_forks(void) { pthread_atfork(hold, let_go, let_go); }

static long realtime_offset, boottime_offset;

int clock_gettime(clockid_t clock, struct timespec *out) {
  int result = (int)syscall(SYS_clock_gettime, clock, out);
  if (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE) out->tv_sec += realtime_offset;
  if (clock == CLOCK_BOOTTIME) out->tv_sec += boottime_offset;
  return result;
}

/* ---- what the process calls */

/* Watch the files in the directory `path`, absolute and without links; "" to stop. */
void faults_watch(const char *path) {
  snprintf(root, sizeof root, "%s", path);
  root_length = strlen(root);
}

/* Append the journal to the file `path`; "" to stop. */
void faults_record(const char *path) {
  if (journal >= 0) close(journal);
  journal = *path ? (int)syscall(SYS_openat, AT_FDCWD, path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600) : -1;
}

void faults_mark(uint64_t number) {
  pthread_mutex_lock(&mutex);
  note(MARK, "", number, 0, "", 0);
  pthread_mutex_unlock(&mutex);
}

/* Let the `nth` of the next `calls` fail with `error`, and with `persistent` all after it; 0 calls: none. An error of 0
 * makes writes short instead; a negative one kills the process before the call. */
void faults_fail(int calls, long nth, int error, int persistent) {
  pthread_mutex_lock(&mutex);
  failing_calls = calls, num_until_failure = nth, failing_error = error, is_persistent = persistent;
  is_short = !error, num_seen = num_failed = 0;
  pthread_mutex_unlock(&mutex);
}

/* Let files grow by `nbytes` more; -1: without limit. With `told`, statvfs says so. */
void faults_allow(long nbytes, int told) {
  pthread_mutex_lock(&mutex);
  num_left = nbytes, is_told = told;
  pthread_mutex_unlock(&mutex);
}

/* Let the wall clock, and the clock since boot, jump to so many seconds off. */
void faults_jump(long realtime, long boottime) { realtime_offset = realtime, boottime_offset = boottime; }

long faults_seen(void) { return num_seen; }
long faults_failed(void) { return num_failed; }
