//! Plans on disk, so that another process need not search for them. One file per plan, named by hashes of what it is for;
//! written beside and then renamed, so that readers see whole files only. A file that is damaged or was written by
//! something else is passed over with a warning.
//!
//! A file tells which nodes of a window run together and nothing of how: the fusers are offered those nodes and make the
//! groups anew, so that whatever a file says, a plan computes what its window says. Files take a number of bytes at most.

use crate::arrange::arrange;
use crate::plan::Plan;
use crate::recompute::{Recompute, expand, rebuilt};
use crate::{Fuser, Window};
use kiln_ir::wire::{Reader, WireError, Writer};
use kiln_ir::{Id, Item, Meta};
use rustc_hash::FxHasher;
use std::fs::{File, OpenOptions};
use std::hash::{Hash, Hasher};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

const MAGIC: &[u8; 8] = b"kilnplan";
/// Changes whenever the form of the files or the meaning of a structure does.
const FORMAT: u32 = 3;
/// What a file takes at least.
const BLOCK: u64 = 4096;
/// The longest file that is written or read.
const LONGEST: u64 = 8 << 20;
/// A file that was begun so long ago was left behind.
const LEFT: Duration = Duration::from_secs(3600);

pub(crate) struct Disk {
    dir: PathBuf,
    /// What plans must have been made with.
    tag: String,
    /// Bytes that the folder's plans may take, and about how many they take; `None` before they were counted.
    most: u64,
    held: Option<u64>,
}

impl Disk {
    pub fn new(dir: PathBuf, tag: &str, most: u64) -> Disk {
        Disk { dir, tag: format!("{} {FORMAT} {tag}", env!("CARGO_PKG_VERSION")), most, held: None }
    }

    /// Plans are made with the fuser of this name too.
    pub fn also(&mut self, fuser: &str) {
        self.tag = format!("{} {fuser}", self.tag);
    }

    fn path(&self, hash: u64) -> PathBuf {
        let mut hasher = FxHasher::default();
        self.tag.hash(&mut hasher);
        self.dir.join(format!("{:016x}-{hash:016x}.plan", hasher.finish()))
    }

    /// The plan of a structure for `window`, if it was saved.
    pub fn load<V: 'static>(
        &self,
        hash: u64,
        structure: &[u64],
        window: &Window<'_>,
        fusers: &[Box<dyn Fuser<V>>],
        outside: impl Fn(Id) -> Option<Meta>,
    ) -> Option<Plan<V>> {
        let path = self.path(hash);
        let bytes = contents(&path)?;
        match self.read(&bytes, structure, window, fusers, outside) {
            Ok(plan) => Some(plan),
            Err(reason) => {
                warn(&path, &reason);
                None
            }
        }
    }

    fn read<V: 'static>(
        &self,
        bytes: &[u8],
        structure: &[u64],
        window: &Window<'_>,
        fusers: &[Box<dyn Fuser<V>>],
        outside: impl Fn(Id) -> Option<Meta>,
    ) -> Result<Plan<V>, String> {
        let body = bytes.strip_prefix(MAGIC).ok_or("it is not a plan")?;
        let (body, sum) = body.split_last_chunk::<4>().ok_or("it is truncated")?;
        if crc32fast::hash(body) != u32::from_le_bytes(*sum) {
            return Err("its checksum is wrong".into());
        }
        let bad = |e: WireError| e.to_string();
        let mut r = Reader::new(body);
        if r.text().map_err(bad)? != self.tag {
            return Err("it was made by another version".into());
        }
        let words = r.length(1).map_err(bad)?;
        for at in 0..words {
            if structure.get(at) != Some(&r.int().map_err(bad)?) {
                return Err("it is for another window".into());
            }
        }
        if words != structure.len() {
            return Err("it is for another window".into());
        }
        let recomputed = recomputed(&mut r).map_err(bad)?;
        let fits = |at: &usize| window.items.get(*at).is_some_and(|item| matches!(item, Item::Run(_)));
        if !recomputed.iter().all(|a| !a.users.is_empty() && a.nodes.iter().chain(&a.users).all(fits)) {
            return Err("what it repeats is not in the window".into());
        }
        let expanded;
        let wider;
        let window = match &recomputed[..] {
            [] => window,
            recomputed => {
                expanded = expand(window.items, recomputed).items;
                wider = Window::new(&expanded, outside).ok_or("what it repeats does not fit the window")?;
                &wider
            }
        };
        let mut owner = vec![None; window.items.len()];
        let mut groups = Vec::new();
        for number in 0..r.length(1).map_err(bad)? {
            let fuser = r.text().map_err(bad)?;
            let places = read_places(&mut r).map_err(bad)?;
            if places.is_empty() {
                return Err("a group is empty".into());
            }
            for (i, &at) in places.iter().enumerate() {
                let fits = at < owner.len() && owner[at].is_none() && window.node(at).is_some();
                if !fits || i > 0 && places[i - 1] >= at {
                    return Err("a group does not fit the window".into());
                }
                owner[at] = Some(number);
            }
            groups.push(rebuilt(window, fusers, &fuser, places).ok_or("a group is none here")?);
        }
        let plan = arrange(window, groups, &owner).ok_or("its groups wait for each other")?;
        Ok(Plan { recomputed, ..plan })
    }

    /// Saves a plan. Where that is not possible there is a warning, and nothing else.
    pub fn save<V>(&mut self, hash: u64, structure: &[u64], plan: &Plan<V>) {
        let mut w = Writer::default();
        w.text(&self.tag);
        w.int(structure.len() as u64);
        structure.iter().for_each(|&word| w.int(word));
        w.int(plan.recomputed.len() as u64);
        for Recompute { nodes, users } in &plan.recomputed {
            places(&mut w, nodes);
            places(&mut w, users);
        }
        w.int(plan.groups.len() as u64);
        for group in &plan.groups {
            w.text(&group.fuser);
            places(&mut w, &group.places);
        }
        let mut bytes = MAGIC.to_vec();
        bytes.extend_from_slice(&w.bytes);
        bytes.extend_from_slice(&crc32fast::hash(&w.bytes).to_le_bytes());
        let size = taken(bytes.len() as u64);
        if bytes.len() as u64 > LONGEST.min(self.most) {
            return;
        }
        let path = self.path(hash);
        if let Err(error) = self.write(&path, &bytes) {
            return warn(&path, &error.to_string());
        }
        let held = self.held.map_or(u64::MAX, |held| held.saturating_add(size));
        self.held = Some(if held > self.most { self.shrink(&path) } else { held });
    }

    fn write(&self, path: &Path, bytes: &[u8]) -> std::io::Result<()> {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        std::fs::create_dir_all(&self.dir)?;
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let beside = self.dir.join(format!(".{}-{number}.part", std::process::id()));
        // New, so that it is no link that somebody has put there.
        let mut file = OpenOptions::new().write(true).create_new(true).open(&beside)?;
        let expanded = file.write_all(bytes).and_then(|()| std::fs::rename(&beside, path));
        expanded.inspect_err(|_| _ = std::fs::remove_file(&beside))
    }

    /// Removes the oldest plans until the rest takes 7/8 of what it may, but not the one at `last`, and what was begun and
    /// left. Gives about how many bytes are left. Others may do the same at the same time.
    fn shrink(&self, last: &Path) -> u64 {
        let mut files: Vec<(SystemTime, u64, PathBuf)> = Vec::new();
        let now = SystemTime::now();
        for entry in std::fs::read_dir(&self.dir).into_iter().flatten().flatten() {
            let (path, Ok(meta)) = (entry.path(), entry.metadata()) else { continue };
            let changed = meta.modified().unwrap_or(SystemTime::UNIX_EPOCH);
            match path.extension().and_then(|e| e.to_str()) {
                Some("plan") if meta.is_file() => files.push((changed, taken(meta.len()), path)),
                Some("part") if now.duration_since(changed).is_ok_and(|age| age > LEFT) => {
                    let _ = std::fs::remove_file(path);
                }
                _ => {}
            }
        }
        let mut held: u64 = files.iter().map(|(_, bytes, _)| bytes).sum();
        if held <= self.most {
            return held;
        }
        files.sort();
        for (_, bytes, path) in &files {
            if held <= self.most - self.most / 8 {
                break;
            }
            if path != last && std::fs::remove_file(path).is_ok() {
                held -= bytes;
            }
        }
        held
    }
}

/// Bytes that a file of that length takes.
fn taken(length: u64) -> u64 {
    length.next_multiple_of(BLOCK).max(BLOCK)
}

/// The file at `path`, if it is one that may be a plan.
fn contents(path: &Path) -> Option<Vec<u8>> {
    // A pipe would have us wait.
    let meta = std::fs::symlink_metadata(path).ok()?;
    if !meta.is_file() || meta.len() > LONGEST {
        return None;
    }
    let mut bytes = Vec::new();
    File::open(path).ok()?.take(LONGEST).read_to_end(&mut bytes).ok()?;
    Some(bytes)
}

fn places(w: &mut Writer, places: &[usize]) {
    w.int(places.len() as u64);
    places.iter().for_each(|&at| w.int(at as u64));
}

fn read_places(r: &mut Reader<'_>) -> Result<Vec<usize>, WireError> {
    (0..r.length(1)?).map(|_| Ok(r.int()? as usize)).collect()
}

fn recomputed(r: &mut Reader<'_>) -> Result<Vec<Recompute>, WireError> {
    (0..r.length(1)?).map(|_| Ok(Recompute { nodes: read_places(r)?, users: read_places(r)? })).collect()
}

fn warn(path: &Path, reason: &str) {
    eprintln!("kiln: the saved plan {} is not used: {reason}", path.display());
}
