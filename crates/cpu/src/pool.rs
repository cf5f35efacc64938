//! The compute pool of the process: `parallel(chunks, f)` runs `f(0..chunks)` on the caller and its workers.
//!
//! Chunks are claimed one by one, by the caller from the first on, by workers from the last on, so that in a step that
//! recurs each core finds most of its data in its own cache. The caller finishes whatever nobody claimed, so a preempted
//! worker delays only the chunk it holds. Called by kernels; a nested or second caller runs inline, which is why
//! nothing here can deadlock. Results must not depend on who ran a chunk: index partials by chunk.
//! Deliberately absent: queues, futures, stealing, priorities. `checks/schedules` runs this file under all kinds of schedules.

use crate::stop;
use crate::sync::thread::{self, Thread};
use crate::sync::{AtomicBool, AtomicU64, AtomicUsize, Condvar, Mutex, MutexGuard, spin_until, standard};
use std::any::Any;
use std::cell::UnsafeCell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock, PoisonError, TryLockError};

/// Runs `f(0)`, …, `f(chunks - 1)`, each once, in any order and on any thread, and returns when all are done.
///
/// If a chunk panics, chunks not yet claimed are skipped and the first panic is resumed here.
pub fn parallel(chunks: usize, f: &(dyn Fn(usize) + Sync)) {
    POOL.parallel(chunks, f);
}

/// How many threads, the caller included, a call of [`parallel`] may use.
///
/// `KILN_THREADS`, else the number of cores this process may run on, until [`set_threads`] says otherwise.
pub fn threads() -> usize {
    match THREADS.load(Ordering::Relaxed) {
        0 => {
            let n = kiln_env::THREADS.get().unwrap_or_else(cores);
            // A `set_threads` that came in between wins.
            match THREADS.compare_exchange(0, n, Ordering::Relaxed, Ordering::Relaxed) {
                Ok(_) => n,
                Err(set) => set,
            }
        }
        n => n,
    }
}

/// Sets the number of threads from the next call of [`parallel`] on; 1 (or 0) keeps all work on the caller.
pub fn set_threads(n: usize) {
    THREADS.store(n.max(1), Ordering::Relaxed);
}

/// 0 until first asked for.
static THREADS: std::sync::atomic::AtomicUsize = std::sync::atomic::AtomicUsize::new(0);

static POOL: Pool = Pool::new();

/// Workers, and one job for them at a time; every field but `workers` belongs to the job of whoever holds `workers`.
pub struct Pool {
    /// Holding this lock is owning the pool; it is only ever tried, never waited for.
    workers: Mutex<Vec<Arc<Worker>>>,
    /// The range of chunks not yet claimed. It shrinks only by compare-exchange while it is not empty, so that a worker
    /// that wakes late either claims a chunk of the job that is current then, or nothing: no job numbers are needed.
    unclaimed: CacheLine<AtomicU64>,
    /// Chunks not yet finished and reported; the job lives until this is 0.
    unfinished: CacheLine<AtomicUsize>,
    job: UnsafeCell<Option<Job>>,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
    waiting: AtomicBool,
    waiter: Mutex<()>,
    finished: Condvar,
    closed: AtomicBool,
}

// SAFETY: `job` is the only field that is not Sync by itself. It is written by the owner of the pool while nothing is
// unclaimed or unfinished, and read only by a thread that holds an unreported claim.
unsafe impl Sync for Pool {}

#[derive(Clone, Copy)]
struct Job {
    /// Borrowed for the call of `Pool::run` that wrote it; the lifetime is erased.
    f: *const (dyn Fn(usize) + Sync),
    /// What ends it early.
    stop: stop::Flag,
}

/// The end of the range of unclaimed chunks that a thread claims from.
#[derive(Clone, Copy)]
enum End {
    First,
    Last,
}

/// The unclaimed chunks from `first` to before `end`, in one word.
fn range(first: u32, end: u32) -> u64 {
    (first as u64) << 32 | end as u64
}

/// First and end of a range.
fn ends(range: u64) -> (u32, u32) {
    ((range >> 32) as u32, range as u32)
}

fn is_empty(range: u64) -> bool {
    let (first, end) = ends(range);
    first == end
}

/// Keeps the two hot counters off each other's (adjacent) cache lines.
#[repr(align(128))]
struct CacheLine<T>(T);

struct Worker {
    thread: OnceLock<Thread>,
    parked: AtomicBool,
    index: usize,
}

impl Worker {
    /// Wakes it if it is parked.
    fn wake(&self) {
        if self.parked.load(Ordering::SeqCst) {
            self.parked.store(false, Ordering::Relaxed);
            if let Some(thread) = self.thread.get() {
                thread.unpark();
            }
        }
    }
}

impl Default for Pool {
    fn default() -> Pool {
        Pool::new()
    }
}

impl Pool {
    /// A pool without workers; they start when they are needed.
    pub const fn new() -> Pool {
        Pool {
            workers: Mutex::new(Vec::new()),
            unclaimed: CacheLine(AtomicU64::new(0)),
            unfinished: CacheLine(AtomicUsize::new(0)),
            job: UnsafeCell::new(None),
            panic: Mutex::new(None),
            waiting: AtomicBool::new(false),
            waiter: Mutex::new(()),
            finished: Condvar::new(),
            closed: AtomicBool::new(false),
        }
    }

    /// Ends the workers as soon as they find nothing to do, and helps with no job any more. The pool of the process is
    /// never closed.
    pub fn close(&self) {
        let mut workers = self.workers.lock().unwrap_or_else(PoisonError::into_inner);
        // SeqCst: either this thread sees `parked`, or the worker about to park sees that it is over.
        self.closed.store(true, Ordering::SeqCst);
        workers.drain(..).for_each(|worker| worker.wake());
    }

    /// As [`parallel`], on this pool.
    pub fn parallel(&'static self, chunks: usize, f: &(dyn Fn(usize) + Sync)) {
        let alone = chunks <= 1 || chunks > u32::MAX as usize || self.closed.load(Ordering::Relaxed);
        let threads = if alone { 1 } else { threads() };
        let workers = if threads <= 1 { None } else { self.try_own() };
        let Some(mut workers) = workers else {
            for chunk in 0..chunks {
                stop::check();
                f(chunk);
            }
            return;
        };
        let helpers = threads.min(chunks) - 1;
        self.spawn_up_to(&mut workers, helpers);
        let panic = self.run(&workers[..helpers.min(workers.len())], chunks, f);
        drop(workers);
        if let Some(panic) = panic {
            resume_unwind(panic);
        }
    }

    fn try_own(&self) -> Option<MutexGuard<'_, Vec<Arc<Worker>>>> {
        match self.workers.try_lock() {
            Ok(workers) => Some(workers),
            Err(TryLockError::Poisoned(p)) => Some(p.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// Workers start on first need and live as long as the process. Where the system refuses one, fewer help.
    fn spawn_up_to(&'static self, workers: &mut Vec<Arc<Worker>>, helpers: usize) {
        while workers.len() < helpers {
            let index = workers.len();
            let worker = Arc::new(Worker { thread: OnceLock::new(), parked: AtomicBool::new(false), index });
            let own = worker.clone();
            let name = format!("kiln-{}", index + 1);
            match thread::Builder::new().name(name).spawn(move || standard(|| self.serve(&own))) {
                Ok(handle) => worker.thread.get_or_init(|| handle.thread().clone()),
                Err(_) => return,
            };
            workers.push(worker);
        }
    }

    fn run(
        &self,
        helpers: &[Arc<Worker>],
        chunks: usize,
        f: &(dyn Fn(usize) + Sync),
    ) -> Option<Box<dyn Any + Send>> {
        // SAFETY: only the lifetime changes. The pointer is used only under a claim, and this function does not
        // return before every claim is reported, see `wait`.
        let f = unsafe {
            std::mem::transmute::<*const (dyn Fn(usize) + Sync + '_), *const (dyn Fn(usize) + Sync + 'static)>(
                f,
            )
        };
        // SAFETY: the caller owns the pool and the previous job is over, so nobody reads `job` now.
        unsafe { *self.job.get() = Some(Job { f, stop: stop::current() }) };
        self.unfinished.0.store(chunks, Ordering::Relaxed);
        // SeqCst: either this thread sees `parked`, or the worker about to park sees the chunks.
        self.unclaimed.0.store(range(0, chunks as u32), Ordering::SeqCst);
        helpers.iter().for_each(|worker| worker.wake());
        self.work(End::First);
        self.wait();
        self.panic.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// Claims and runs chunks until none is left. True if it ran any.
    fn work(&self, end: End) -> bool {
        let Some(mut chunk) = self.claim(end) else { return false };
        // SAFETY: this thread holds a claim that it reports only at the end of this function, so the job and what
        // it borrows stay alive until then, and further claims are of the same job.
        let job = unsafe { (*self.job.get()).expect("a claim implies a job") };
        // SAFETY: as above.
        let f = unsafe { &*job.f };
        let run = |chunk: usize| {
            stop::check();
            f(chunk)
        };
        let mut done = 0;
        loop {
            // SAFETY: the thread that owns the job waits for all chunks, so it stays under its flag.
            let outcome =
                unsafe { stop::under_flag(job.stop, || catch_unwind(AssertUnwindSafe(|| run(chunk)))) };
            done += 1;
            if let Err(panic) = outcome {
                self.panic.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(panic);
                let (first, end) = ends(self.unclaimed.0.swap(0, Ordering::AcqRel));
                done += (end - first) as usize;
            }
            match self.claim(end) {
                Some(next) => chunk = next,
                None => break,
            }
        }
        // SeqCst pairs with `wait`: either the waiter sees 0, or this thread sees it waiting.
        if self.unfinished.0.fetch_sub(done, Ordering::SeqCst) == done && self.waiting.load(Ordering::SeqCst)
        {
            drop(self.waiter.lock().unwrap_or_else(PoisonError::into_inner));
            self.finished.notify_all();
        }
        true
    }

    /// The chunk at one end of those that are unclaimed.
    fn claim(&self, from: End) -> Option<usize> {
        let left = |(first, end): (u32, u32)| match from {
            End::First => (first + 1, end),
            End::Last => (first, end - 1),
        };
        let take = |unclaimed: u64| {
            (!is_empty(unclaimed)).then(|| left(ends(unclaimed))).map(|(first, end)| range(first, end))
        };
        let before = self.unclaimed.0.fetch_update(Ordering::AcqRel, Ordering::Relaxed, take).ok()?;
        let (first, end) = ends(before);
        Some(match from {
            End::First => first as usize,
            End::Last => end as usize - 1,
        })
    }

    /// Returns when all chunks are reported.
    fn wait(&self) {
        let over = || self.unfinished.0.load(Ordering::SeqCst) == 0;
        if over() || (threads() <= cores() && spin_until(over)) {
            return;
        }
        self.waiting.store(true, Ordering::SeqCst);
        let mut guard = self.waiter.lock().unwrap_or_else(PoisonError::into_inner);
        while !over() {
            guard = self.finished.wait(guard).unwrap_or_else(PoisonError::into_inner);
        }
        self.waiting.store(false, Ordering::Relaxed);
    }

    fn serve(&self, own: &Worker) {
        let available = || own.index + 1 < threads() && !is_empty(self.unclaimed.0.load(Ordering::SeqCst));
        loop {
            if available() && self.work(End::Last) {
                continue;
            }
            if self.closed.load(Ordering::SeqCst) {
                return;
            }
            let limit = threads();
            if own.index + 1 < limit && limit <= cores() && spin_until(available) {
                continue;
            }
            own.parked.store(true, Ordering::SeqCst);
            if available() || self.closed.load(Ordering::SeqCst) {
                own.parked.store(false, Ordering::Relaxed);
                continue;
            }
            // A stray token from an earlier unpark only costs a turn of this loop.
            while own.parked.load(Ordering::Acquire) {
                thread::park();
            }
        }
    }
}

fn cores() -> usize {
    static CORES: OnceLock<usize> = OnceLock::new();
    *CORES.get_or_init(|| std::thread::available_parallelism().map_or(1, |n| n.get()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    /// `set_threads` is process-wide, so tests that set it take turns.
    static TURN: Mutex<()> = Mutex::new(());

    fn turn() -> MutexGuard<'static, ()> {
        TURN.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn sum(chunks: usize) -> u64 {
        let total = AtomicU64::new(0);
        parallel(chunks, &|i| {
            total.fetch_add(i as u64 + 1, Ordering::Relaxed);
        });
        total.into_inner()
    }

    #[test]
    fn every_chunk_runs_once() {
        let _turn = turn();
        for threads in [1, 2, 4, 2, 3, 1] {
            set_threads(threads);
            for chunks in (0..40).chain([100, 1000, 4097]) {
                let n = chunks as u64;
                assert_eq!(sum(chunks), n * (n + 1) / 2, "{threads} threads, {chunks} chunks");
            }
        }
    }

    #[test]
    fn many_small_jobs_in_a_row() {
        let _turn = turn();
        for threads in [2, 4] {
            set_threads(threads);
            for round in 0..20_000 {
                let chunks = 2 + round % 7;
                let n = chunks as u64;
                assert_eq!(sum(chunks), n * (n + 1) / 2);
            }
        }
    }

    #[test]
    fn work_after_the_workers_parked() {
        let _turn = turn();
        set_threads(2);
        for _ in 0..20 {
            thread::sleep(Duration::from_millis(1));
            assert_eq!(sum(64), 2080);
        }
    }

    #[test]
    fn nested_calls_run_inline() {
        let _turn = turn();
        set_threads(4);
        let total = AtomicU64::new(0);
        parallel(16, &|_| {
            total.fetch_add(sum(10), Ordering::Relaxed);
        });
        assert_eq!(total.into_inner(), 16 * 55);
    }

    #[test]
    fn two_callers_at_once() {
        let _turn = turn();
        set_threads(2);
        thread::scope(|s| {
            for _ in 0..3 {
                s.spawn(|| {
                    for _ in 0..3000 {
                        assert_eq!(sum(20), 210);
                    }
                });
            }
        });
    }

    #[test]
    fn panic_reaches_the_caller_and_the_pool_goes_on() {
        let _turn = turn();
        for threads in [1, 2, 4] {
            set_threads(threads);
            for bad in [0, 7, 31] {
                let job = || {
                    parallel(32, &|i| {
                        if i == bad {
                            std::panic::panic_any(bad)
                        }
                    })
                };
                let panic = catch_unwind(job).expect_err("the chunk panics");
                assert_eq!(panic.downcast_ref::<usize>(), Some(&bad));
                assert_eq!(sum(100), 5050);
            }
        }
    }

    #[test]
    fn long_chunks_outlast_the_spin() {
        let _turn = turn();
        set_threads(2);
        let done = AtomicU64::new(0);
        parallel(4, &|_| {
            thread::sleep(Duration::from_millis(2));
            done.fetch_add(1, Ordering::Relaxed);
        });
        assert_eq!(done.into_inner(), 4);
    }
}
