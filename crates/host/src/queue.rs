//! Work that is executed in order by whoever holds the executor: a thread that waits for an answer runs the queue
//! itself, a background thread runs it where nobody waits. Knows nothing of the work. `checks/schedules` runs this file
//! under all kinds of schedules.

use crate::sync::{Condvar, Mutex, MutexGuard};
use std::collections::VecDeque;
use std::sync::PoisonError;

/// Work that waits, and what executing it needs.
pub struct Queue<W, E> {
    waiting: Mutex<Waiting<W>>,
    /// Wakes the background thread.
    wake: Condvar,
    executor: Mutex<E>,
}

struct Waiting<W> {
    /// Each with its size.
    work: VecDeque<(W, usize)>,
    size: usize,
    /// The background thread should run.
    kicked: bool,
    stopped: bool,
}

impl<W, E> Queue<W, E> {
    /// An empty queue.
    pub fn new(executor: E) -> Queue<W, E> {
        let waiting = Waiting { work: VecDeque::new(), size: 0, kicked: false, stopped: false };
        Queue { waiting: Mutex::new(waiting), wake: Condvar::new(), executor: Mutex::new(executor) }
    }

    /// Adds work of some size. Gives the size of all that waits.
    pub fn push(&self, work: W, size: usize) -> usize {
        let mut waiting = self.lock();
        waiting.size += size;
        waiting.work.push_back((work, size));
        waiting.size
    }

    /// Whether nothing waits.
    pub fn is_empty(&self) -> bool {
        self.lock().work.is_empty()
    }

    /// What executing needs, while nothing is executed.
    pub fn executor(&self) -> MutexGuard<'_, E> {
        self.executor.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Executes what waits. Everything that was pushed before the call is done afterwards, by this thread or another.
    pub fn run(&self, execute: &mut dyn FnMut(&mut E, W)) {
        loop {
            let mut executor = self.executor();
            while let Some(work) = self.next() {
                execute(&mut executor, work);
            }
            drop(executor);
            // Work that came between the last look and the release of the lock has no other runner.
            if self.lock().work.is_empty() {
                return;
            }
        }
    }

    fn next(&self) -> Option<W> {
        let mut waiting = self.lock();
        let (work, size) = waiting.work.pop_front()?;
        waiting.size -= size;
        Some(work)
    }

    /// Has the background thread run what waits.
    pub fn kick(&self) {
        let mut waiting = self.lock();
        if !waiting.kicked {
            waiting.kicked = true;
            self.wake.notify_one();
        }
    }

    /// The background thread: runs the queue whenever it is kicked, until it is stopped.
    pub fn serve(&self, execute: &mut dyn FnMut(&mut E, W)) {
        loop {
            let mut waiting = self.lock();
            while !waiting.kicked && !waiting.stopped {
                waiting = self.wake.wait(waiting).unwrap_or_else(PoisonError::into_inner);
            }
            if waiting.stopped {
                return;
            }
            waiting.kicked = false;
            drop(waiting);
            self.run(execute);
        }
    }

    /// Ends the background thread. What still waits is executed by whoever runs the queue.
    pub fn stop(&self) {
        self.lock().stopped = true;
        self.wake.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, Waiting<W>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
