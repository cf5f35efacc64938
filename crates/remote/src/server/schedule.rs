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

/// The sessions with something to do.
#[derive(Default)]
pub struct Schedule {
    state: Mutex<State>,
    work: Condvar,
}

#[derive(Default)]
struct State {
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
        loop {
            let client = {
                let mut state = self.lock();
                loop {
                    let least = |c: &Arc<Client>| c.used.load(Ordering::Relaxed);
                    let next = (0..state.ready.len()).min_by_key(|&i| least(&state.ready[i]));
                    if let Some(next) = next {
                        let client = state.ready.swap_remove(next);
                        state.level = state.level.max(least(&client));
                        state.running += 1;
                        break client;
                    }
                    if state.stopped {
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
