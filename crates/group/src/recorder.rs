//! The flight recorder: the last collectives of a rank, kept in memory and written to a folder when a group fails.

use crate::Error;
use crate::call::Signature;
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;
use std::panic::Location;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

/// Collectives kept.
pub const KEPT: usize = 2000;

/// How far a collective has come.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[allow(missing_docs)]
pub enum State {
    /// Called, behind others or not yet begun.
    Issued,
    /// This rank is in it.
    Started,
    Done,
    Failed,
}

/// One collective as a rank saw it.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Record {
    /// What was asked for.
    pub signature: Signature,
    /// The group by name.
    pub name: String,
    /// How far it came.
    pub state: State,
    /// The line that called.
    pub line: String,
    /// When, in microseconds since 1970.
    pub issued: u64,
    /// Microseconds after that; 0 if it has not.
    pub started: u64,
    /// Likewise.
    pub ended: u64,
}

/// What a rank leaves behind.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Dump {
    /// Whose.
    pub rank: usize,
    /// How many ranks the job has.
    pub world: usize,
    /// Its process.
    pub pid: u32,
    /// Why it was written.
    pub error: Option<Error>,
    /// The same in words.
    pub message: Option<String>,
    /// Its last collectives, oldest first.
    pub records: Vec<Record>,
}

/// The recorder of a rank, shared by all its groups.
pub(crate) struct Recorder {
    rank: usize,
    world: usize,
    folder: Option<PathBuf>,
    /// The same moment by both clocks.
    begun: (Instant, u64),
    ring: Mutex<Ring>,
}

#[derive(Default)]
struct Ring {
    /// The number of the oldest kept.
    first: u64,
    entries: VecDeque<Entry>,
}

struct Entry {
    signature: Signature,
    name: Arc<str>,
    state: State,
    line: &'static Location<'static>,
    issued: Instant,
    started: Option<Instant>,
    ended: Option<Instant>,
}

impl Recorder {
    pub(crate) fn new(rank: usize, world: usize, folder: Option<PathBuf>) -> Recorder {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_micros() as u64);
        Recorder { rank, world, folder, begun: (Instant::now(), now), ring: Mutex::default() }
    }

    /// Notes a call; gives its number.
    pub(crate) fn issued(
        &self,
        signature: Signature,
        name: &Arc<str>,
        line: &'static Location<'static>,
    ) -> u64 {
        let mut ring = self.lock();
        if ring.entries.len() == KEPT {
            ring.entries.pop_front();
            ring.first += 1;
        }
        let entry = Entry {
            signature,
            name: name.clone(),
            state: State::Issued,
            line,
            issued: Instant::now(),
            started: None,
            ended: None,
        };
        ring.entries.push_back(entry);
        ring.first + ring.entries.len() as u64 - 1
    }

    pub(crate) fn moved(&self, number: u64, state: State) {
        let mut ring = self.lock();
        let at = number.checked_sub(ring.first);
        if let Some(entry) = at.and_then(|at| ring.entries.get_mut(at as usize)) {
            entry.state = state;
            match state {
                State::Issued => {}
                State::Started => entry.started = Some(Instant::now()),
                State::Done | State::Failed => entry.ended = Some(Instant::now()),
            }
        }
    }

    /// Everything kept.
    pub(crate) fn dump(&self, error: Option<&Error>) -> Dump {
        let micros = |t: Instant| t.saturating_duration_since(self.begun.0).as_micros() as u64;
        let record = |e: &Entry| Record {
            signature: e.signature,
            name: e.name.to_string(),
            state: e.state,
            line: format!("{}:{}", e.line.file(), e.line.line()),
            issued: self.begun.1 + micros(e.issued),
            started: e.started.map_or(0, |t| (t - e.issued).as_micros() as u64),
            ended: e.ended.map_or(0, |t| (t - e.issued).as_micros() as u64),
        };
        Dump {
            rank: self.rank,
            world: self.world,
            pid: std::process::id(),
            error: error.cloned(),
            message: error.map(|e| e.to_string()),
            records: self.lock().entries.iter().map(record).collect(),
        }
    }

    /// Writes what is kept to the folder that was set, if any. A full disk must not hide the failure that is reported.
    pub(crate) fn failed(&self, error: &Error) {
        if let Some(folder) = &self.folder
            && let Err(problem) = write(folder, &self.dump(Some(error)))
        {
            eprintln!("rank {}: no flight record: {problem}", self.rank);
        }
    }

    fn lock(&self) -> MutexGuard<'_, Ring> {
        self.ring.lock().unwrap_or_else(|e| e.into_inner())
    }
}

/// Writes `rank-N.json`, whole or not at all.
pub fn write(folder: &Path, dump: &Dump) -> Result<PathBuf, Error> {
    let path = folder.join(format!("rank-{}.json", dump.rank));
    let fresh = folder.join(format!(".rank-{}.{}", dump.rank, std::process::id()));
    let written = std::fs::create_dir_all(folder)
        .and_then(|()| std::fs::write(&fresh, serde_json::to_vec(dump).map_err(std::io::Error::other)?))
        .and_then(|()| std::fs::rename(&fresh, &path));
    match written {
        Ok(()) => Ok(path),
        Err(error) => {
            let _ = std::fs::remove_file(&fresh);
            Err(Error::system(&path.display().to_string(), error))
        }
    }
}
