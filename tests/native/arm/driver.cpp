// Makes recorded calls again with a level's library, and checks what it writes: driver LIBRARY FILE. files.py says what the
// file holds. Prints the text of recorded decoding, then a line of counts; answers 0 if all was as it must be.
#include <dlfcn.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <map>
#include <string>
#include <vector>

namespace {

FILE* file;
int64_t cases, calls, checks, numbers, tokens, failed;
double worst;  // error of a number, as a share of what is allowed

[[noreturn]] void stop(const char* what, const char* why) {
  fprintf(stderr, "driver: %s: %s\n", what, why);
  exit(2);
}

void read(void* to, int64_t size) {
  if (size && fread(to, 1, (size_t)size, file) != (size_t)size) stop("the file of cases", "ends within a command");
}
int64_t number() {
  int64_t x;
  read(&x, sizeof x);
  return x;
}
std::string text() {
  std::string x((size_t)number(), 0);
  read(&x[0], (int64_t)x.size());
  return x;
}
template <class T>
std::vector<T> list(int64_t count) {
  std::vector<T> x((size_t)count);
  read(x.data(), count * (int64_t)sizeof(T));
  return x;
}

struct Memory {
  char *block, *at;
  int64_t size;
};
std::map<int64_t, Memory> memory;

constexpr int64_t BEHIND = 64;  // bytes that streams may read behind their end

char* place(int64_t id, int64_t offset, int64_t size) {
  auto found = memory.find(id);
  if (found == memory.end() || offset < 0 || offset + size > found->second.size) stop("a case", "names no such memory");
  return found->second.at + offset;
}

void take_memory() {
  const int64_t id = number(), align = number(), size = number();
  auto old = memory.find(id);
  if (old != memory.end()) free(old->second.block), memory.erase(old);
  char* block = (char*)aligned_alloc(64, (size_t)((size + align + BEHIND + 63) / 64 * 64));
  if (!block) stop("a case", "there is not as much memory");
  memset(block, 0, (size_t)(size + align + BEHIND));
  memory[id] = {block, block + align, size};
  read(block + align, size);
}

void call(void* library) {
  const std::string name = text();
  int64_t given[4] = {};
  const int64_t count = number();
  if (count > 4) stop(name.c_str(), "takes four arguments at most");
  for (int64_t i = 0; i < count; i++) {
    char kind;
    read(&kind, 1);
    given[i] = number();
    if (kind == 'p') given[i] = (int64_t)place(given[i], number(), 0);
  }
  auto function = (int (*)(int64_t, int64_t, int64_t, int64_t))dlsym(library, name.c_str());
  if (!function) stop(name.c_str(), dlerror());
  calls++;
  if (const int code = function(given[0], given[1], given[2], given[3])) {
    printf("FAILED %s answers %d\n", name.c_str(), code);
    failed++;
  }
}

double element(int64_t id, int64_t type, int64_t at) {
  if (type == 0) {
    float x;
    memcpy(&x, place(id, at * 4, 4), 4);
    return x;
  }
  if (type == 1) {
    uint16_t half;
    memcpy(&half, place(id, at * 2, 2), 2);
    const uint32_t bits = (uint32_t)half << 16;
    float x;
    memcpy(&x, &bits, 4);
    return x;
  }
  if (type == 2) {
    int64_t x;
    memcpy(&x, place(id, at * 8, 8), 8);
    return (double)x;
  }
  return *(const uint8_t*)place(id, at, 1);
}

void check() {
  const std::string name = text();
  const int64_t id = number(), type = number(), count = number();
  const auto at = list<int64_t>(count);
  const auto right = list<double>(count), allowed = list<double>(count);
  int64_t wrong = 0, first = -1;
  double most = 0;
  for (int64_t i = 0; i < count; i++) {
    const double x = element(id, type, at[i]), off = x == right[i] ? 0 : fabs(x - right[i]), share = off / allowed[i];
    if (!(off <= allowed[i])) wrong++, first = first < 0 ? i : first;
    if (share > most) most = share;
  }
  checks++, numbers += count;
  if (most > worst) worst = most;
  if (!wrong) return;
  failed++;
  printf("FAILED %s: %ld of %ld numbers, %g instead of %g +- %g at %ld, at most %g times what is allowed\n", name.c_str(),
         (long)wrong, (long)count, element(id, type, at[first]), right[first], allowed[first], (long)at[first], most);
}

void token() {
  const int64_t id = number(), offset = number(), count = number(), right = number();
  const std::string piece = text();
  const float* logits = (const float*)place(id, offset, count * 4);
  int64_t most = 0;
  for (int64_t i = 1; i < count; i++)
    if (logits[i] > logits[most]) most = i;
  tokens++;
  if (most != right) printf("FAILED token %ld instead of %ld\n", (long)most, (long)right), failed++;
  fputs(piece.c_str(), stdout);
}

void end() {
  const std::string name = text();
  for (auto& one : memory) free(one.second.block);
  memory.clear();
  cases++;
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 3) stop("usage", "driver LIBRARY FILE");
  void* library = dlopen(arguments[1], RTLD_NOW);
  if (!library) stop(arguments[1], dlerror());
  Dl_info where;
  if (dladdr(dlsym(library, "headway_linear"), &where)) fprintf(stderr, "library at %p\n", where.dli_fbase);
  file = fopen(arguments[2], "rb");
  if (!file) stop(arguments[2], "cannot be read");
  for (int command; (command = fgetc(file)) != EOF;) {
    if (command == 'R') {
      take_memory();
    } else if (command == 'P') {
      const int64_t id = number(), offset = number(), size = number();
      read(place(id, offset, size), size);
    } else if (command == 'L') {
      const int64_t id = number(), offset = number(), to = number();
      const char* address = place(to, number(), 0);
      memcpy(place(id, offset, 8), &address, 8);
    } else if (command == 'C') {
      call(library);
    } else if (command == 'E') {
      check();
    } else if (command == 'T') {
      token();
    } else if (command == 'F') {
      end();
    } else {
      stop("the file of cases", "has a command that is none");
    }
  }
  printf("\n%ld cases, %ld calls, %ld checks of %ld numbers, %ld tokens, %ld failed, at most %.3g of what is allowed\n",
         (long)cases, (long)calls, (long)checks, (long)numbers, (long)tokens, (long)failed, worst);
  return failed ? 1 : 0;
}
