//! Files that Kiln reads: recordings, plans and checkpoints. Checksums are made right, since whoever writes a file can.

use kiln::store::Checkpoint;
use kiln_cpu::Cpu;
use kiln_device::{Batch, Bytes, Control, Data, Driver, Place, Record, replay};
use kiln_ir::wire::Reader;
use kiln_ir::{DType, Id, Item, text};
use std::path::{Path, PathBuf};
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

/// What a device may hold.
const QUOTA: usize = 16 << 20;

/// Something fuses here, is reduced, multiplied, and read by index.
const PROGRAM: &str = "a = input f32[4,64]\nb = input f32[64,8]\ni = input i64[4,1]\n\
    n = full shape=[] value=f32:0.5\nc = mul a n\nd = exp c\nfree c\nm = max d axes=[1] keep=true\ne = sub d m\n\
    s = sum e axes=[1] keep=true\nq = div e s\np = dot q b transpose=false\nr = relu p\ng = gather r i axis=1\nfree e\nfree d";

/// A folder of this process, in memory where there is one for that.
fn folder() -> &'static Path {
    static FOLDER: LazyLock<PathBuf> = LazyLock::new(|| {
        let memory = Path::new("/dev/shm");
        let base = if memory.is_dir() { memory.to_path_buf() } else { std::env::temp_dir() };
        let folder = base.join(format!("kiln-fuzz-{}", std::process::id()));
        let _ = std::fs::create_dir_all(&folder);
        folder
    });
    &FOLDER
}

/// Deletes what the targets wrote.
pub fn clean() {
    let _ = std::fs::remove_dir_all(folder());
}

/// The folder is shared by the targets, which run one after another in a process, but tests may not.
static TURN: Mutex<()> = Mutex::new(());

fn limited(device: Cpu) -> Cpu {
    device.limit(Some(QUOTA));
    device
}

/// Runs the program on a device and gives the content of its results.
fn ran(device: &dyn Driver) -> Vec<Result<Vec<u8>, String>> {
    let program = text::parse(PROGRAM).expect("a program");
    for (id, meta) in &program.inputs {
        let bytes = (0..meta.shape.numel()).flat_map(|i| match meta.dtype {
            DType::F32 => ((i % 23) as f32 / 8.0).to_le_bytes().to_vec(),
            _ => ((i % 8) as i64).to_le_bytes().to_vec(),
        });
        device.write(*id, Data::new(*meta, Bytes::new(bytes.collect::<Vec<u8>>())), Place::Reuse);
    }
    let mut outs: Vec<Id> = Vec::new();
    for item in &program.items {
        match item {
            Item::Run(node) => outs.push(node.outs[0]),
            Item::Free(id) => outs.retain(|out| out != id),
        }
    }
    device.submit(Batch { items: program.items, ..Batch::default() });
    let read =
        |id: &Id| device.read(*id).wait().map(|data| data.bytes.to_vec()).map_err(|e| e.root().to_string());
    outs.iter().map(read).collect()
}

/// The frames of a recording, without lengths and sums.
fn recorded() -> &'static (Vec<u8>, Vec<Vec<u8>>) {
    static MADE: LazyLock<(Vec<u8>, Vec<Vec<u8>>)> = LazyLock::new(|| {
        let path = folder().join("seed.record");
        let record = Record::new(Arc::new(Cpu::start()), &path).expect("a recording");
        let _ = ran(&record);
        record.flush().expect("a whole recording");
        drop(record);
        let bytes = std::fs::read(&path).expect("the recording");
        let word =
            |at: usize| bytes[at..at + 8].iter().rev().fold(0usize, |word, &byte| word << 8 | byte as usize);
        let (mut at, mut frames) = (20, Vec::new());
        while at < word(8) {
            let end = at + 12 + word(at);
            frames.push(bytes[at + 12..end].to_vec());
            at = end;
        }
        (bytes[..8].to_vec(), frames)
    });
    &MADE
}

/// A recording of frames, each two bytes of length and its content, after the table of operations.
pub fn recordings(input: &[u8]) -> u64 {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let (magic, frames) = recorded();
    let mut file = vec![0; 20];
    let mut put = |payload: &[u8]| {
        file.extend((payload.len() as u64).to_le_bytes());
        file.extend(crc32fast::hash(payload).to_le_bytes());
        file.extend_from_slice(payload);
    };
    put(&frames[0]);
    let mut rest = input;
    while let [low, high, after @ ..] = rest {
        let (payload, left) = after.split_at((*low as usize | (*high as usize) << 8).min(after.len()));
        put(payload);
        rest = left;
    }
    let end = (file.len() as u64).to_le_bytes();
    file[..8].copy_from_slice(magic);
    file[8..16].copy_from_slice(&end);
    file[16..20].copy_from_slice(&crc32fast::hash(&end).to_le_bytes());
    let path = folder().join("fuzzed.record");
    std::fs::write(&path, &file).expect("a file");
    let device: Arc<dyn Driver> = Arc::new(limited(Cpu::start()));
    let _watched = super::grammar::watched(&device);
    let outcome = replay(&path, &*device);
    assert!(device.memory().live_bytes <= QUOTA);
    super::targets::number(match outcome {
        Ok(done) => format!(
            "{} {} {} {}",
            done.items.min(20),
            done.writes.min(5),
            done.reads.min(20),
            done.differing.len().min(3)
        ),
        Err(error) => error.root().to_string().chars().filter(|c| !c.is_ascii_digit()).collect(),
    })
}

/// A device whose plans are in the folder.
fn planned() -> Cpu {
    let device = limited(Cpu::start());
    device.cache(folder().join("plans"));
    device
}

/// The plan that the device keeps of the program, and what the program gives.
struct PlanFile {
    path: PathBuf,
    /// The bytes up to and including what says that it is of this program.
    head: Vec<u8>,
    /// What runs together: the part that is fuzzed.
    groups: Vec<u8>,
    results: Vec<Result<Vec<u8>, String>>,
}

fn plan() -> &'static PlanFile {
    static MADE: LazyLock<PlanFile> = LazyLock::new(|| {
        let results = ran(&planned());
        let mut files: Vec<PathBuf> =
            std::fs::read_dir(folder().join("plans")).expect("plans").flatten().map(|e| e.path()).collect();
        files.retain(|path| path.extension().is_some_and(|e| e == "plan"));
        let bytes = std::fs::read(&files[0]).expect("a plan");
        let body = &bytes[8..bytes.len() - 4];
        let mut r = Reader::new(body);
        let _ = r.text();
        for _ in 0..r.int().unwrap_or(0) {
            let _ = r.int();
        }
        let groups = r.rest().to_vec();
        let head = bytes[..bytes.len() - 4 - groups.len()].to_vec();
        PlanFile { path: files.swap_remove(0), head, groups, results }
    });
    &MADE
}

/// A plan that says to be of this program: whatever it says, the results are the program's.
pub fn plans(input: &[u8]) -> u64 {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let plan = plan();
    let mut file = [&plan.head[..], input].concat();
    let sum = crc32fast::hash(&file[8..]);
    file.extend(sum.to_le_bytes());
    std::fs::write(&plan.path, &file).expect("a file");
    let device = planned();
    assert!(ran(&device) == plan.results, "another plan gives other results");
    let stats = device.fusion();
    super::targets::number(format!("{stats:?}"))
}

/// A checkpoint's bytes.
pub fn checkpoints(input: &[u8]) -> u64 {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let path = folder().join("fuzzed.safetensors");
    std::fs::write(&path, input).expect("a file");
    super::targets::number(match Checkpoint::read(&path) {
        Ok(read) => format!("{} {} {}", read.step, read.words.len(), read.tensors.len()),
        Err(error) => error.to_string().chars().filter(|c| !c.is_ascii_digit()).collect(),
    })
}

/// Honest inputs of a target.
pub fn seeds(target: &str) -> Vec<Vec<u8>> {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    match target {
        "recordings" => {
            let mut all = Vec::new();
            for frame in &recorded().1[1..] {
                all.extend((frame.len() as u16).to_le_bytes());
                all.extend_from_slice(frame);
            }
            vec![all, Vec::new()]
        }
        "plans" => vec![plan().groups.clone(), Vec::new()],
        _ => {
            let folder = folder().join("checkpoints");
            let device = kiln::Device::cpu();
            let tensor = kiln::Tensor::zeros([2, 3], &device);
            let words = [("job".to_string(), "fuzz".to_string())].into_iter().collect();
            let made = Checkpoint::save(&folder, 3, &words, &[("w".into(), tensor)]);
            let bytes = made.ok().and_then(|path| std::fs::read(path).ok());
            vec![bytes.unwrap_or_default(), Vec::new()]
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn honest_files_are_read() {
        for (target, run) in
            [("recordings", recordings as fn(&[u8]) -> u64), ("plans", plans), ("checkpoints", checkpoints)]
        {
            let seeds = seeds(target);
            assert_ne!(run(&seeds[0]), run(&seeds[1]), "{target}");
        }
        let results = &plan().results;
        assert!(results.iter().all(Result::is_ok), "{results:?}");
        clean();
    }
}
