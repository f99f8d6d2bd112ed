// Repeats recorded calls of the library's functions in one call from Python.
#include "recording.h"

// A recorded call is the address of an `hr_..._words` function, the number of its arguments, and the
// arguments.
extern "C" void hr_repeat_calls(const int64_t *words, int64_t calls) {
    for (int64_t i = 0; i < calls; i++) {
        auto function = hr::from_word<void (*)(const int64_t *)>(words[0]);
        function(words + 2);
        words += 2 + words[1];
    }
}
