// If a drive cannot deliver a mapped page, the process gets SIGBUS and ends without a message. This
// handler prints a message: what was read, and what to do. Then the former handler of the signal runs.
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
    sigaction(SIGBUS, &before, nullptr);  // the access is repeated, and the former handler gets its signal
}

}  // namespace

// Registers a `text` that is printed if a page of these bytes cannot be read. Returns the number of
// the range, or -1 if there is no room.
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

// Unregisters a range, because these bytes may now belong to other code.
extern "C" void ebbtide_forget(int number) {
    if (number >= 0) ranges[number].end = ranges[number].begin;
}
