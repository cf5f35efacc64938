//! Messages that have come and were not asked for yet.

use crate::Error;
use std::collections::{HashMap, VecDeque};
use std::sync::{Condvar, Mutex, MutexGuard};
use std::time::Instant;

/// Bytes before the content: the group and the kind.
const PREFIX: usize = 16;
const DATA: u64 = 0;
pub(super) const ABORT: u64 = 1;
pub(super) const LEFT: u64 = 2;

/// What has come and was not asked for yet.
#[derive(Default)]
pub(crate) struct Mailbox {
    state: Mutex<Received>,
    news: Condvar,
}

#[derive(Default)]
struct Received {
    /// By group and sender.
    queues: HashMap<(u64, usize), VecDeque<Vec<u8>>>,
    over: HashMap<u64, Error>,
    left: HashMap<(u64, usize), u64>,
}

impl Mailbox {
    /// A message from a process.
    pub(crate) fn deliver(&self, from: usize, message: Vec<u8>) {
        if message.len() < PREFIX {
            return;
        }
        let word = |at: usize| u64::from_le_bytes(std::array::from_fn(|i| message[at + i]));
        let (group, kind) = (word(0), word(8));
        let mut state = lock(&self.state);
        match kind {
            ABORT => {
                let reason = || String::from_utf8_lossy(&message[PREFIX..]).into_owned();
                let error = serde_json::from_slice(&message[PREFIX..])
                    .unwrap_or_else(|_| Error::Aborted { rank: from, reason: reason() });
                state.over.entry(group).or_insert(error);
            }
            LEFT if message.len() >= PREFIX + 8 => {
                let after = word(PREFIX);
                state.left.insert((group, from), after);
            }
            _ => state.queues.entry((group, from)).or_default().push_back(message),
        }
        drop(state);
        self.news.notify_all();
    }

    /// The next message of a group from a process. What came before its end counts; nothing if time is up.
    pub(crate) fn take(&self, group: u64, from: usize, until: Instant) -> Result<Option<Vec<u8>>, Lost> {
        let mut state = lock(&self.state);
        loop {
            if let Some(error) = state.over.get(&group) {
                return Err(Lost::Over(error.clone()));
            }
            if let Some(mut message) = state.queues.get_mut(&(group, from)).and_then(VecDeque::pop_front) {
                message.drain(..PREFIX);
                return Ok(Some(message));
            }
            if let Some(&after) = state.left.get(&(group, from)) {
                return Err(Lost::Left(after));
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(None);
            }
            state = self.news.wait_timeout(state, left).unwrap_or_else(|e| e.into_inner()).0;
        }
    }

    pub(super) fn end(&self, group: u64, error: &Error) {
        lock(&self.state).over.entry(group).or_insert_with(|| error.clone());
        self.news.notify_all();
    }
}

/// Why a message will not come.
pub(crate) enum Lost {
    Over(Error),
    Left(u64),
}

/// A message of a group.
pub(crate) fn message(group: u64, content: &[&[u8]]) -> Vec<u8> {
    sealed(group, DATA, content)
}

pub(super) fn sealed(group: u64, kind: u64, content: &[&[u8]]) -> Vec<u8> {
    let mut message = Vec::with_capacity(PREFIX + content.iter().map(|c| c.len()).sum::<usize>());
    message.extend(group.to_le_bytes());
    message.extend(kind.to_le_bytes());
    content.iter().for_each(|c| message.extend_from_slice(c));
    message
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|e| e.into_inner())
}
