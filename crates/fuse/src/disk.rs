//! Plans on disk, so that another process need not search for them. One file a plan, named by hashes of what it is for;
//! written beside and then renamed, so that readers see whole files only. A file that is damaged or was written by
//! something else is passed over with a warning.

use crate::again::{Again, write};
use crate::arrange::arrange;
use crate::plan::{Group, Plan};
use crate::{Fuser, Window};
use kiln_ir::wire::{Reader, WireError, Writer};
use kiln_ir::{Id, Item, Meta};
use rustc_hash::FxHasher;
use std::hash::{Hash, Hasher};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

const MAGIC: &[u8; 8] = b"kilnplan";
/// Changes whenever the form of the files or the meaning of a structure does.
const FORMAT: u32 = 2;

pub(crate) struct Disk {
    dir: PathBuf,
    /// What plans must have been made with.
    tag: String,
}

impl Disk {
    pub fn new(dir: PathBuf, tag: &str) -> Disk {
        Disk { dir, tag: format!("{} {FORMAT} {tag}", env!("CARGO_PKG_VERSION")) }
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
        let bytes = std::fs::read(&path).ok()?;
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
        let (body, sum) = body.split_last_chunk::<4>().ok_or("it is cut")?;
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
        let again = again(&mut r).map_err(bad)?;
        let fits = |at: &usize| window.items.get(*at).is_some_and(|item| matches!(item, Item::Run(_)));
        if !again.iter().all(|a| !a.users.is_empty() && a.nodes.iter().chain(&a.users).all(fits)) {
            return Err("what it repeats is not in the window".into());
        }
        let written;
        let wider;
        let window = match &again[..] {
            [] => window,
            again => {
                written = write(window.items, again).items;
                wider = Window::new(&written, outside).ok_or("what it repeats does not fit the window")?;
                &wider
            }
        };
        let mut owner = vec![None; window.items.len()];
        let mut groups = Vec::new();
        for number in 0..r.length(1).map_err(bad)? {
            let group = group(&mut r, fusers).map_err(bad)?.ok_or("a group is not known here")?;
            for (i, &at) in group.places.iter().enumerate() {
                let fits = at < owner.len() && owner[at].is_none() && window.node(at).is_some();
                if !fits || i > 0 && group.places[i - 1] >= at {
                    return Err("a group does not fit the window".into());
                }
                owner[at] = Some(number);
            }
            groups.push(group);
        }
        let plan = arrange(window, groups, &owner).ok_or("its groups wait for each other")?;
        Ok(Plan { again, ..plan })
    }

    /// Saves a plan. Where that is not possible there is a warning, and nothing else.
    pub fn save<V>(&self, hash: u64, structure: &[u64], plan: &Plan<V>) {
        let mut w = Writer::default();
        w.text(&self.tag);
        w.int(structure.len() as u64);
        structure.iter().for_each(|&word| w.int(word));
        w.int(plan.again.len() as u64);
        for Again { nodes, users } in &plan.again {
            places(&mut w, nodes);
            places(&mut w, users);
        }
        w.int(plan.groups.len() as u64);
        for group in &plan.groups {
            w.text(&group.fuser);
            places(&mut w, &group.places);
            w.blob(&group.optimization.state());
        }
        let mut bytes = MAGIC.to_vec();
        bytes.extend_from_slice(&w.bytes);
        bytes.extend_from_slice(&crc32fast::hash(&w.bytes).to_le_bytes());
        let path = self.path(hash);
        if let Err(error) = self.write(&path, &bytes) {
            warn(&path, &error.to_string());
        }
    }

    fn write(&self, path: &Path, bytes: &[u8]) -> std::io::Result<()> {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        std::fs::create_dir_all(&self.dir)?;
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let beside = self.dir.join(format!(".{}-{number}.part", std::process::id()));
        std::fs::write(&beside, bytes)?;
        std::fs::rename(&beside, path).inspect_err(|_| _ = std::fs::remove_file(&beside))
    }
}

fn places(w: &mut Writer, places: &[usize]) {
    w.int(places.len() as u64);
    places.iter().for_each(|&at| w.int(at as u64));
}

fn read_places(r: &mut Reader<'_>) -> Result<Vec<usize>, WireError> {
    (0..r.length(1)?).map(|_| Ok(r.int()? as usize)).collect()
}

fn again(r: &mut Reader<'_>) -> Result<Vec<Again>, WireError> {
    (0..r.length(1)?).map(|_| Ok(Again { nodes: read_places(r)?, users: read_places(r)? })).collect()
}

fn group<V>(r: &mut Reader<'_>, fusers: &[Box<dyn Fuser<V>>]) -> Result<Option<Group<V>>, WireError> {
    let fuser = r.text()?;
    let places = read_places(r)?;
    let state = r.blob()?;
    let made = fusers.iter().find(|f| f.name() == fuser).and_then(|f| f.rebuild(state));
    Ok(made.filter(|made| made.len() == places.len() && !places.is_empty()).map(|optimization| {
        let name = optimization.name();
        Group { places, optimization, name, fuser }
    }))
}

fn warn(path: &Path, reason: &str) {
    eprintln!("kiln: the saved plan {} is not used: {reason}", path.display());
}
