// Functions of the library as calls with an array of 64-bit words, which can be recorded and
// repeated.
//
// A word is an integer, an address, or the bits of a double. `HR_RECORDABLE(hr_f)` after a function
// defines `hr_f_words`, which takes the arguments of `hr_f` from such an array.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

namespace hr {

template <class T>
inline T from_word(int64_t word) {
    static_assert(sizeof(T) == sizeof(word));
    T value;
    std::memcpy(&value, &word, sizeof value);
    return value;
}

template <class... Args, size_t... I>
inline void call_with_words(void (*function)(Args...), const int64_t *words, std::index_sequence<I...>) {
    function(from_word<Args>(words[I])...);
}

template <class... Args>
inline void call_with_words(void (*function)(Args...), const int64_t *words) {
    call_with_words(function, words, std::index_sequence_for<Args...>{});
}

}  // namespace hr

#define HR_RECORDABLE(NAME) \
    extern "C" void NAME##_words(const int64_t *words) { hr::call_with_words(NAME, words); }
