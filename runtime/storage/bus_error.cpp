// A drive that cannot deliver a mapped page kills the process with SIGBUS and no word. Here are the
// words: what was being read, and what to do. The signal then does what it did before.
#include <csignal>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <unistd.h>

namespace {

struct Range {
    volatile uintptr_t begin, end;
    const char* text;  // never freed
};

constexpr int MOST = 1 << 14;
Range ranges[MOST];
struct sigaction before;

void explain(int, siginfo_t* info, void*) {
    const uintptr_t at = reinterpret_cast<uintptr_t>(info->si_addr);
    for (const Range& range : ranges)
        if (range.begin <= at && at < range.end) {
            (void)!write(2, range.text, std::strlen(range.text));
            break;
        }
    sigaction(SIGBUS, &before, nullptr);  // the access is tried again, and meets this one
}

}  // namespace

// Says `text` when a page of these bytes does not come. Returns the range's number; -1: no room.
extern "C" int ebbtide_explain(uintptr_t begin, uintptr_t size, const char* text) {
    static std::mutex lock;
    std::lock_guard<std::mutex> hold(lock);
    static bool once = [] {
        struct sigaction ours = {};
        ours.sa_sigaction = explain;
        ours.sa_flags = SA_SIGINFO | SA_ONSTACK;
        return sigaction(SIGBUS, &ours, &before) == 0;
    }();
    for (int i = 0; once && i < MOST; ++i)
        if (ranges[i].begin == ranges[i].end) {
            ranges[i].text = strdup(text);
            ranges[i].begin = begin;
            ranges[i].end = begin + size;
            return i;
        }
    return -1;
}

// These bytes belong to somebody else from now on.
extern "C" void ebbtide_forget(int number) {
    if (number >= 0) ranges[number].end = ranges[number].begin;
}
