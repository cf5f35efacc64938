//! Who computes next: the session that has used the least of the device.
//!
//! A session is claimed by at most one worker at a time, which does its tasks in order for a quantum. A session that
//! was idle starts level with the others, so that rest is not saved up.

use super::registry::Client;
use crate::protocol::ProtocolError;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// How long a session computes before others are looked at. A task is never cut.
pub const QUANTUM: Duration = Duration::from_millis(5);

/// Workers that may be added while tasks take long.
const MOST_EXTRA: usize = 64;

/// The sessions with something to do.
#[derive(Default)]
pub struct Schedule {
    state: Mutex<State>,
    work: Condvar,
}

#[derive(Default)]
struct State {
    /// When a worker last looked for something to do.
    picked: Option<Instant>,
    /// Workers that were added because the others were busy for long.
    extra: usize,
    ready: Vec<Arc<Client>>,
    /// The least used of what was picked last: new-comers start here.
    level: u64,
    running: usize,
    stopped: bool,
}

impl Schedule {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Queues a session, if it has something to do and no worker has it.
    pub fn offer(&self, client: &Arc<Client>) {
        if client.is_over() || !client.session().is_ready() || client.claimed.swap(true, Ordering::AcqRel) {
            return;
        }
        let mut state = self.lock();
        client.used.fetch_max(state.level, Ordering::Relaxed);
        state.ready.push(client.clone());
        drop(state);
        self.work.notify_one();
    }

    /// Computes until the schedule is stopped.
    pub fn serve(&self) {
        self.work(false);
    }

    /// Whether somebody has waited for `limit` because all workers have long tasks: another worker is due, which is to
    /// call [`Schedule::help`].
    pub fn is_stuck(&self, limit: Duration) -> bool {
        let mut state = self.lock();
        let stuck = !state.ready.is_empty()
            && state.extra < MOST_EXTRA
            && !state.stopped
            && state.picked.is_some_and(|picked| picked.elapsed() > limit);
        state.extra += usize::from(stuck);
        stuck
    }

    /// Computes until nobody waits any more.
    pub fn help(&self) {
        // Given back however it ends.
        struct Extra<'a>(&'a Schedule);
        impl Drop for Extra<'_> {
            fn drop(&mut self) {
                self.0.lock().extra -= 1;
            }
        }
        let _extra = Extra(self);
        self.work(true);
    }

    /// There was no thread for another worker.
    pub fn gave_up(&self) {
        self.lock().extra -= 1;
    }

    fn work(&self, extra: bool) {
        loop {
            let client = {
                let mut state = self.lock();
                loop {
                    state.picked = Some(Instant::now());
                    let least = |c: &Arc<Client>| c.used.load(Ordering::Relaxed);
                    let next = (0..state.ready.len()).min_by_key(|&i| least(&state.ready[i]));
                    if let Some(next) = next {
                        let client = state.ready.swap_remove(next);
                        state.level = state.level.max(least(&client));
                        state.running += 1;
                        break client;
                    }
                    if state.stopped || extra {
                        return;
                    }
                    state = self.work.wait(state).unwrap_or_else(|e| e.into_inner());
                }
            };
            turn(&client);
            self.lock().running -= 1;
            client.claimed.store(false, Ordering::Release);
            // What came while it was claimed.
            self.offer(&client);
        }
    }

    /// Sessions that wait for a worker or have one.
    pub fn busy(&self) -> usize {
        let state = self.lock();
        state.ready.len() + state.running
    }

    /// Lets workers return when nothing is left to do.
    pub fn stop(&self) {
        self.lock().stopped = true;
        self.work.notify_all();
    }
}

/// A session's turn.
fn turn(client: &Client) {
    let start = Instant::now();
    loop {
        // A fault of ours costs one session, not the worker that others need too.
        let worked = catch_unwind(AssertUnwindSafe(|| client.work()));
        let worked = worked.unwrap_or(Err(ProtocolError::Misuse("the server failed while it computed")));
        match worked {
            Ok(Some(micros)) => {
                // Nothing is free: a session of empty tasks uses the device too.
                client.used.fetch_add(micros.max(1), Ordering::Relaxed);
                client.news.notify_one();
            }
            Ok(None) => return,
            Err(error) => {
                client.end_because(&error.to_string());
                return;
            }
        }
        if start.elapsed() > QUANTUM {
            return;
        }
    }
}
