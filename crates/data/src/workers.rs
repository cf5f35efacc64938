//! Worker threads: jobs by number in, their results in order out.
//!
//! Each worker takes the next number that nobody has, as long as it is within a window behind the result that is waited
//! for, so that memory is bounded and the order of results is that of the numbers, whoever is quick.

use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

/// Threads at work on jobs `0..jobs`.
pub(crate) struct Workers<T> {
    shared: Arc<Shared<T>>,
    threads: Vec<JoinHandle<()>>,
    /// Threads that did not answer in time are left behind when this is dropped: they cannot be waited for.
    stuck: bool,
}

struct Shared<T> {
    state: Mutex<State<T>>,
    /// There is a result, or a worker has ended.
    ready: Condvar,
    /// There is room for another, or nothing more to do.
    room: Condvar,
}

struct State<T> {
    /// The job that is begun next.
    next: usize,
    /// The results that were taken.
    taken: usize,
    /// Results by number; nothing where the job unwound.
    done: BTreeMap<usize, Option<T>>,
    /// Workers that have not ended.
    alive: usize,
    stopped: bool,
}

/// Why there is no result.
pub(crate) enum Missing {
    /// It was not there in time.
    Late,
    /// Its worker ended without it.
    Lost,
}

impl<T: Send + 'static> Workers<T> {
    /// Begins with `count` threads, or as many of them as the system has room for; `window` results at most are held.
    pub fn start(
        count: usize,
        window: usize,
        jobs: usize,
        job: impl Fn(usize) -> T + Send + Sync + 'static,
    ) -> Workers<T> {
        let state = State { next: 0, taken: 0, done: BTreeMap::new(), alive: 0, stopped: false };
        let shared =
            Arc::new(Shared { state: Mutex::new(state), ready: Condvar::new(), room: Condvar::new() });
        let job = Arc::new(job);
        let mut threads = Vec::new();
        for at in 0..count {
            let (worker, job) = (Ending(shared.clone()), job.clone());
            shared.lock().alive += 1;
            let work = move || worker.0.work(window.max(1), jobs, &*job);
            // A thread that cannot be had drops the closure, and with it `Ending`.
            threads.extend(std::thread::Builder::new().name(format!("kiln-data-{at}")).spawn(work));
        }
        Workers { shared, threads, stuck: false }
    }

    /// The next result. Each is asked for once, in order.
    pub fn take(&mut self, within: Option<Duration>) -> Result<T, Missing> {
        let mut state = self.shared.lock();
        let at = state.taken;
        let missing = |state: &mut State<T>| !state.done.contains_key(&at) && state.alive > 0;
        state = match within {
            None => self.shared.ready.wait_while(state, missing).unwrap_or_else(PoisonError::into_inner),
            Some(within) => {
                let waited = self.shared.ready.wait_timeout_while(state, within, missing);
                waited.unwrap_or_else(PoisonError::into_inner).0
            }
        };
        let result = state.done.remove(&at);
        if result.is_none() && state.alive > 0 {
            self.stuck = true;
            return Err(Missing::Late);
        }
        state.taken += 1;
        drop(state);
        self.shared.room.notify_all();
        result.flatten().ok_or(Missing::Lost)
    }

    /// Results that are there and not taken.
    #[cfg(test)]
    fn held(&self) -> usize {
        self.shared.lock().done.len()
    }
}

impl<T> Drop for Workers<T> {
    fn drop(&mut self) {
        let mut state = self.shared.lock();
        state.stopped = true;
        state.done.clear();
        drop(state);
        self.shared.room.notify_all();
        if !self.stuck {
            for thread in self.threads.drain(..) {
                let _ = thread.join();
            }
        }
    }
}

impl<T> Shared<T> {
    fn lock(&self) -> MutexGuard<'_, State<T>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn work(&self, window: usize, jobs: usize, job: &impl Fn(usize) -> T) {
        loop {
            let full = |state: &mut State<T>| {
                !state.stopped && state.next < jobs && state.next - state.taken >= window
            };
            let mut state = self.room.wait_while(self.lock(), full).unwrap_or_else(PoisonError::into_inner);
            if state.stopped || state.next >= jobs {
                return;
            }
            let at = state.next;
            state.next += 1;
            drop(state);
            let mut begun = Begun { shared: self, at, result: None };
            begun.result = Some(job(at));
        }
    }
}

/// A job that was begun: whoever waits for it hears of it, also if it unwinds.
struct Begun<'a, T> {
    shared: &'a Shared<T>,
    at: usize,
    result: Option<T>,
}

impl<T> Drop for Begun<'_, T> {
    fn drop(&mut self) {
        let mut state = self.shared.lock();
        if !state.stopped {
            state.done.insert(self.at, self.result.take());
        }
        drop(state);
        self.shared.ready.notify_all();
    }
}

/// Counts a worker out, however it ends.
struct Ending<T>(Arc<Shared<T>>);

impl<T> Drop for Ending<T> {
    fn drop(&mut self) {
        self.0.lock().alive -= 1;
        self.0.ready.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::time::Duration;

    #[test]
    fn results_come_in_order_and_the_window_holds() {
        for workers in [1, 2, 5] {
            let begun = Arc::new(AtomicUsize::new(0));
            let count = begun.clone();
            let mut pool = Workers::start(workers, 3, 40, move |at| {
                count.fetch_add(1, Ordering::Relaxed);
                std::thread::sleep(Duration::from_micros((at as u64 * 37) % 900));
                at
            });
            for at in 0..40 {
                assert!(matches!(pool.take(None), Ok(result) if result == at));
                assert!(pool.held() <= 3 && begun.load(Ordering::Relaxed) <= at + 1 + 3);
            }
        }
    }

    #[test]
    fn a_job_that_unwinds_is_told_and_the_others_go_on() {
        for workers in [1, 2] {
            let mut pool =
                Workers::start(workers, 2, 5, |at| if at == 1 { panic!("on purpose") } else { at });
            assert!(matches!(pool.take(None), Ok(0)));
            assert!(matches!(pool.take(None), Err(Missing::Lost)));
            // With one worker nobody is left; nobody waits for it either.
            assert_eq!(pool.take(None).is_ok(), workers == 2);
        }
    }

    #[test]
    fn what_is_late_is_told_and_not_waited_for() {
        let (open, gate) = std::sync::mpsc::channel::<()>();
        let gate = Mutex::new(gate);
        let mut pool = Workers::start(1, 2, 5, move |at| {
            let _ = gate.lock().unwrap().recv();
            at
        });
        assert!(matches!(pool.take(Some(Duration::from_millis(20))), Err(Missing::Late)));
        drop(pool);
        drop(open);
    }

    #[test]
    fn dropping_stops_the_rest() {
        let begun = Arc::new(AtomicUsize::new(0));
        let count = begun.clone();
        let mut pool = Workers::start(2, 4, 1000, move |at| (count.fetch_add(1, Ordering::Relaxed), at));
        assert!(pool.take(None).is_ok());
        drop(pool);
        assert!(begun.load(Ordering::Relaxed) <= 5 && Arc::strong_count(&begun) == 1);
    }
}
