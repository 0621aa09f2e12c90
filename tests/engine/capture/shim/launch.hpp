// Included after a handler's source: calls its kernels by argument words. The entries are written by tests/engine/capture/shim_build.py.
namespace shim {

template <typename T>
struct Argument { static T from(u64 word) { return T(word); } };
template <typename T>
struct Argument<T*> { static T* from(u64 word) { return reinterpret_cast<T*>(word); } };

template <u32... I>
struct Indices {};
template <u32 N, u32... I>
struct IndicesOf : IndicesOf<N - 1, N - 1, I...> {};
template <u32... I>
struct IndicesOf<0, I...> { typedef Indices<I...> type; };

template <typename... A>
struct Caller {
    template <u32... I>
    static void spread(void (*function)(A...), const u64* arguments, Indices<I...>) {
        function(Argument<A>::from(arguments[I])...);
    }
    static void call(const void* function, const u64* arguments) {
        auto typed = reinterpret_cast<void (*)(A...)>(const_cast<void*>(function));
        spread(typed, arguments, typename IndicesOf<sizeof...(A)>::type());
    }
};

template <typename... A>
void launch(void (*function)(A...), u32 blocks, u32 threads, u64 seed, const u64* arguments) {
    run(blocks, threads, seed, Body{Caller<A...>::call, reinterpret_cast<const void*>(function), arguments});
}

}  // namespace shim
