"""`@function`: a plain or `async def` function becomes a program that runs against a back end."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import warnings
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, overload

from headrace.lang import tracer
from headrace.lang.backend.choose import need_backend
from headrace.lang.core_loop import core
from headrace.lang.executor import StreamExecutor
from headrace.lang.family import Family
from headrace.lang.forking import MIN_PREFIX_CHARS
from headrace.lang.global_config import global_config
from headrace.lang.program_batch import Batch, BatchOptions
from headrace.lang.program_errors import is_failed_generation
from headrace.lang.sampling import SglSamplingParams, program_defaults
from headrace.lang.state import AsyncProgramState, ProgramState

P = ParamSpec("P")
R = TypeVar("R")

_SAMPLING = (
    "max_new_tokens",
    "n",
    "stop",
    "stop_token_ids",
    "stop_regex",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "ignore_eos",
    "return_logprob",
    "logprob_start_len",
    "top_logprobs_num",
    "return_text_in_logprobs",
)
_BY_KEYWORD = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


class SglFunction(Generic[P, R]):
    """A program: a function whose first parameter is the state, with methods that run it.

    If a parameter of the function has the name of an option of `run`, the value goes to the
    function, and the option keeps its default.

    Attributes:
        func: the function itself.
        num_api_spec_tokens: most tokens of one request, if the back end fills a turn by one
            request.
        bind_arguments: arguments that `bind` has set.
        arg_names: names of the positional parameters after `s`.
        arg_defaults: default values of the last of these parameters.
        is_async: whether the function is `async def`.
    """

    __name__: str
    __qualname__: str

    def __init__(
        self,
        func: Callable[..., Any],
        num_api_spec_tokens: int | None = None,
        bind_arguments: Mapping[str, Any] | None = None,
        owner: Any = None,
    ) -> None:
        """Read the function's parameters.

        Raises:
            TypeError: the first parameter is not `s`.
        """
        self.func = func
        self.num_api_spec_tokens = num_api_spec_tokens
        self.bind_arguments = dict(bind_arguments or {})
        self.is_async = inspect.iscoroutinefunction(func)
        self._owner = owner
        self._signature = inspect.signature(func)
        parameters = list(self._signature.parameters.values())
        names = [parameter.name for parameter in parameters]
        self._is_method = len(names) > 1 and names[0] != "s" and names[1] == "s"
        own = parameters[2:] if self._is_method else parameters[1:]
        if not self._is_method and (not names or names[0] != "s"):
            raise TypeError(
                f"The first parameter of {func.__qualname__} must be named s: it is the program's "
                f"state; it has {', '.join(names) or 'no parameters'}."
            )
        positional = [parameter for parameter in own if parameter.kind in _POSITIONAL]
        self.arg_names = [parameter.name for parameter in positional]
        self.arg_defaults = tuple(
            parameter.default
            for parameter in positional
            if parameter.default is not parameter.empty
        )
        self._declared = {parameter.name for parameter in own}
        # Keywords in this set are parameters of the function, so a call needs no further
        # inspection.
        self._keywords = {one.name for one in own if one.kind in _BY_KEYWORD}
        self._required = {
            one.name for one in own if one.default is one.empty and one.kind not in _VARIADIC
        }
        functools.update_wrapper(self, func)

    def __get__(self, owner: Any, kind: type[Any] | None = None) -> SglFunction[..., R]:
        """Bind the program to an object, if it is a method `def method(self, s, ...)`."""
        if owner is None or not self._is_method:
            return self
        return SglFunction(self.func, self.num_api_spec_tokens, self.bind_arguments, owner)

    def __repr__(self) -> str:
        return f"<SglFunction {getattr(self, '__qualname__', self.func)}>"

    # ---- running ----

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> ProgramState:
        """Run the program; if the caller is being traced, trace this program too."""
        scope = tracer.current()
        if scope is not None:
            return scope.trace_child(self, args, kwargs)
        return self.run(*args, **kwargs)

    def run(self, *args: Any, **kwargs: Any) -> ProgramState:
        """Run the program and return its state.

        Keywords that are options of `run` are taken out; all other keywords go to the function.
        Sampling options are defaults, which each `gen` may override.

        Args:
            args: positional arguments of the function.
            kwargs: keyword arguments of the function, and these options: `max_new_tokens` (or
                `max_tokens`) 128, `n` 1, `stop`, `stop_token_ids`, `stop_regex`, `temperature` 1.0,
                `top_p` 1.0, `top_k` -1, `min_p`, `frequency_penalty`, `presence_penalty`,
                `ignore_eos`, `return_logprob`, `logprob_start_len`, `top_logprobs_num`,
                `return_text_in_logprobs`; `stream`, to return at once and be read by `text_iter`;
                `timeout`, in seconds, after which the program is ended and reading a variable that
                is not set raises `ProgramTimeout`; `backend`; `use_thread`, accepted and ignored.

        Returns:
            The program's state. The function has returned (except with `stream`), but variables
            that it did not read may still be generated.

        Raises:
            RuntimeError: no back end is given, and there is no default.
            Exception: the exception that the function raised.
        """
        call = self._call(args, kwargs)
        state = call.new_state()
        if self.is_async:
            # An `async def` body runs as a task on the frontend's event loop.
            future = core().submit(call.run_async(state))
            if not call.stream:
                family = state.stream_executor.family
                family.wait(lambda: family.body_done)
                call.raise_own(state)
            del future
        elif call.stream:
            context = contextvars.copy_context()
            core().threads.start(lambda: context.run(call.run_body, state))
        else:
            call.run_body(state)
            call.raise_own(state)
        if global_config.verbosity >= 2:
            print(state.text())  # noqa: T201  what verbosity is for
        return state

    async def arun(self, *args: Any, **kwargs: Any) -> ProgramState:
        """Run the program as `run` does, as a coroutine of any event loop.

        An `async def` function runs as a task of the caller's loop, a plain function in a thread.

        Returns:
            The program's state. The program is done, so reads do not wait. With `stream` the state
            is returned at once.
        """
        call = self._call(args, kwargs)
        state = call.new_state()
        body = asyncio.create_task(self._body(call, state))
        if call.stream:
            # The task is stored, because a task without a reference may be garbage-collected.
            call.keep(body)
            return state
        try:
            await body
            await state.aio.sync()
        except asyncio.CancelledError:
            state.cancel()
            raise
        call.raise_own(state)
        return state

    async def _body(self, call: Call, state: ProgramState) -> None:
        if self.is_async:
            await call.run_async(state)
            return
        done = asyncio.get_running_loop().create_future()
        loop = asyncio.get_running_loop()
        context = contextvars.copy_context()

        def resolve() -> None:
            if not done.done():
                done.set_result(None)

        def run() -> None:
            context.run(call.run_body, state)
            loop.call_soon_threadsafe(resolve)

        core().threads.start(run)
        await done

    # ---- many at once ----

    @overload
    def run_batch(
        self, batch_kwargs: Iterable[Any], *, return_exceptions: bool = False, **options: Any
    ) -> list[ProgramState]: ...
    @overload
    def run_batch(self, batch_kwargs: Iterable[Any], **options: Any) -> Any: ...
    def run_batch(self, batch_kwargs: Iterable[Any], **options: Any) -> Any:
        """Run the program once for each element.

        Args:
            batch_kwargs: for each run a dictionary of keywords or a sequence of positional
                arguments; an iterator is read only as needed.
            options: the options of `run` except `stream` (`timeout` applies to each program), and
                these: `num_threads`, how many programs run at a time, or "auto"; `progress_bar`;
                `generator_style`, to get an iterator that yields the states in order as they are
                done; `return_exceptions`, to get a function's exception in place of its state.

        Returns:
            The states of all runs, in the order of the elements. All programs are done. A
            generation that failed does not raise; `error()` of its state returns the error.

        Raises:
            TypeError: an element is not a dictionary or sequence, or does not fit the function.
            Exception: the exception of the first run that raised one; a note names its index.
        """
        batch = self._batch(batch_kwargs, options)
        return batch.iterate() if batch.options.generator_style else batch.run()

    async def arun_batch(self, batch_kwargs: Iterable[Any], **options: Any) -> list[Any]:
        """Do the same as `run_batch`, but as a coroutine; `concurrency` means `num_threads`.

        `async def` functions run on the frontend's own event loop.
        """
        if "concurrency" in options:
            options["num_threads"] = options.pop("concurrency")
        return await self._batch(batch_kwargs, options).run_async()

    def _batch(self, batch_kwargs: Iterable[Any], options: dict[str, Any]) -> Batch:
        own = BatchOptions.taken_from(options)
        options, backend = self._run_options(options, declared=frozenset())
        if options.keys() - set(_SAMPLING):
            unknown = ", ".join(sorted(options.keys() - set(_SAMPLING)))
            raise TypeError(f"run_batch has no option {unknown}; the elements hold arguments.")
        return Batch(self, batch_kwargs, program_defaults(**options), backend, own)

    # ---- binding, tracing, caching ----

    def bind(self, **kwargs: Any) -> SglFunction[..., R]:
        """Return a copy of the program with these arguments set; a call's keywords override them.

        Raises:
            TypeError: the function has no parameters of these names.
        """
        unknown = kwargs.keys() - set(self.arg_names) - self._declared
        if unknown:
            raise TypeError(
                f"{self.__qualname__} has no parameter {', '.join(sorted(unknown))}; it has "
                f"{', '.join(self.arg_names) or 'none'}."
            )
        bound = {**self.bind_arguments, **kwargs}
        return SglFunction(self.func, self.num_api_spec_tokens, bound, self._owner)

    def trace(self, *, backend: Any = None, **kwargs: Any) -> tracer.TracerState:
        """Run the function without sending requests, and return what it appends.

        Arguments that are missing are replaced by symbols.
        """
        return tracer.trace(self, {**self.bind_arguments, **kwargs}, backend)

    def cache(self, backend: Any = None) -> None:
        """Let the server cache the constant text with which the program begins, if it is long."""
        chosen = need_backend(backend)
        prefix = tracer.constant_prefix(self, self.bind_arguments, chosen)
        if len(prefix) > MIN_PREFIX_CHARS:
            core().call(chosen.async_cache_prefix(prefix))

    # ---- calls ----

    def call_body(self, state: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Call the function itself and return its result; of `async def`, return the coroutine."""
        first = (self._owner, state) if self._is_method else (state,)
        if self._is_method and self._owner is None:
            first, args = (args[0], state), args[1:]
        return self.func(*first, *args, **{**self._bound_beside(args), **kwargs})

    def check_arguments(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Check that the function can be called with these arguments.

        Raises:
            TypeError: there are too many, unknown or missing arguments.
        """
        if not args and self._required <= kwargs.keys() <= self._keywords:
            return
        first = (None, None) if self._is_method else (None,)
        self._signature.bind(*first, *args, **{**self._bound_beside(args), **kwargs})

    def _bound_beside(self, args: tuple[Any, ...]) -> dict[str, Any]:
        given = self.arg_names[: len(args)]
        return {name: value for name, value in self.bind_arguments.items() if name not in given}

    def _run_options(
        self, kwargs: Mapping[str, Any], declared: Iterable[str]
    ) -> tuple[dict[str, Any], Any]:
        options = {k: v for k, v in kwargs.items() if k not in declared}
        if "max_tokens" in options:
            options.setdefault("max_new_tokens", options.pop("max_tokens"))
        backend = options.pop("backend", None)
        return options, need_backend(backend)

    def _call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
        taken = ("max_tokens", "backend", "stream", "timeout", "use_thread", *_SAMPLING)
        free = [name for name in taken if name not in self._declared]
        options = {name: kwargs[name] for name in free if name in kwargs}
        own = {name: value for name, value in kwargs.items() if name not in options}
        stream = bool(options.pop("stream", False))
        timeout_s = options.pop("timeout", None)
        options.pop("use_thread", None)
        options, backend = self._run_options(options, declared=frozenset())
        if self.num_api_spec_tokens is not None and not backend.support_api_speculation:
            warnings.warn(
                f"{type(backend).__name__} generates one by one: num_api_spec_tokens is ignored.",
                stacklevel=3,
            )
        return Call(
            *(self, args, own, program_defaults(**options), backend),
            stream=stream,
            timeout_s=timeout_s,
        )


class Call:
    """One run of a program: its arguments and options."""

    def __init__(
        self,
        function: SglFunction[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        defaults: SglSamplingParams,
        backend: Any,
        *,
        stream: bool = False,
        timeout_s: float | None = None,
    ) -> None:
        """Store the arguments and options."""
        self.function = function
        self.args = args
        self.kwargs = kwargs
        self.defaults = defaults
        self.backend = backend
        self.stream = stream
        self.timeout_s = timeout_s

    def new_state(self) -> ProgramState:
        """Create the state with which the program starts."""
        family = Family(self.function.__name__, has_body=True)
        executor = StreamExecutor(
            self.backend,
            self.defaults,
            family,
            stream=self.stream,
            num_api_spec_tokens=self.function.num_api_spec_tokens,
        )
        self.backend.begin_program(executor)
        if self.timeout_s is not None:
            executor.end_after(self.timeout_s)
        return ProgramState(executor)

    def run_body(self, state: ProgramState) -> None:
        """Run the body of a plain function, and store its result or exception in the state."""
        family = state.stream_executor.family
        value, error = None, None
        try:
            with family.as_body():
                value = self.function.call_body(state, self.args, self.kwargs)
        except Exception as raised:
            error = raised
        except BaseException as raised:
            # Ctrl-C or a cancelled task: the pending results will not be read.
            state.cancel()
            self._finish(state, None, raised)
            raise
        self._finish(state, value, error)

    async def run_async(self, state: ProgramState) -> None:
        """Run the body of an `async def` function, and store its result or exception."""
        family = state.stream_executor.family
        value, error = None, None
        try:
            with family.as_body():
                value = await self.function.call_body(state.aio, self.args, self.kwargs)
        except Exception as raised:
            error = raised
        except BaseException as raised:
            # Ctrl-C or a cancelled task: the pending results will not be read.
            state.cancel()
            self._finish(state, None, raised)
            raise
        self._finish(state, value, error)

    def _finish(self, state: ProgramState, value: Any, error: BaseException | None) -> None:
        executor = state.stream_executor
        executor.family.finish_body(value, error)
        if not executor.is_running:
            self.backend.end_program(executor)

    def raise_own(self, state: ProgramState) -> None:
        """Raise the exception that the body raised, if any.

        A failed generation is not raised here; the state reports it.
        """
        error = state.stream_executor.family.body_error
        if error is not None and not is_failed_generation(error):
            raise error

    def keep(self, task: asyncio.Task[None]) -> None:
        """Store a reference to a task until the task is done."""
        _tasks.add(task)
        task.add_done_callback(_tasks.discard)


_tasks: set[asyncio.Task[None]] = set()


@overload
def function(  # type: ignore[overload-overlap]  # a method's `self` comes before `s`
    func: Callable[Concatenate[AsyncProgramState, P], Coroutine[Any, Any, R]],
    num_api_spec_tokens: int | None = None,
) -> SglFunction[P, R]: ...
@overload
def function(
    func: Callable[Concatenate[ProgramState, P], R], num_api_spec_tokens: int | None = None
) -> SglFunction[P, R]: ...
@overload
def function(
    func: Callable[..., R], num_api_spec_tokens: int | None = None
) -> SglFunction[..., R]: ...
@overload
def function(
    func: None = None, num_api_spec_tokens: int | None = None
) -> Callable[[Callable[..., R]], SglFunction[..., R]]: ...
def function(func: Callable[..., Any] | None = None, num_api_spec_tokens: int | None = None) -> Any:
    """Make a program of a function whose first parameter is `s`; a decorator.

    It may be used with or without arguments.

    Args:
        func: a plain function, or an `async def` function, which reads with `await s["name"]`.
        num_api_spec_tokens: with back ends of chat APIs, generate a turn of several generations by
            one request of at most this many tokens.

    Raises:
        TypeError: the first parameter is not `s`.
    """
    if func is None:
        return lambda given: SglFunction(given, num_api_spec_tokens)
    return SglFunction(func, num_api_spec_tokens)
