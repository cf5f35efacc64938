//! Compiled passes by what they are, the ones used last, up to a number of bytes; and their printed form.

use super::Code;
use super::graph::Target;
use crate::fused::kernel::Kernel;
use crate::fused::pass::{Output, Pass};
use iced_x86::{FastFormatter, Instruction};
use rustc_hash::FxHashMap;
use std::sync::{Arc, Mutex, OnceLock};

/// Bytes of code that are kept; a kernel has one to eight thousand.
const CAPACITY: usize = 16 << 20;

#[derive(Default)]
struct Cache {
    /// `None` where a pass cannot be compiled.
    known: FxHashMap<(Pass, Target), Entry>,
    bytes: usize,
    clock: u64,
}

struct Entry {
    code: Option<Arc<Code>>,
    bytes: usize,
    used: u64,
}

/// The compiled pass. Compiling is done outside of the lock: who meets a new pass keeps nobody else waiting, and where two
/// meet the same one, both compile it and the first stays.
pub(super) fn find(pass: &Pass, target: Target) -> Option<Arc<Code>> {
    static CACHE: OnceLock<Mutex<Cache>> = OnceLock::new();
    let cache = CACHE.get_or_init(Mutex::default);
    let lock = || cache.lock().unwrap_or_else(|e| e.into_inner());
    let key = (pass.clone(), target);
    if let Some(known) = lock().get(&key) {
        return known;
    }
    let code = Code::new(pass, target).map(Arc::new);
    let mut cache = lock();
    match cache.get(&key) {
        Some(known) => known,
        None => cache.keep(key, code),
    }
}

impl Cache {
    fn get(&mut self, key: &(Pass, Target)) -> Option<Option<Arc<Code>>> {
        self.clock += 1;
        let entry = self.known.get_mut(key)?;
        entry.used = self.clock;
        Some(entry.code.clone())
    }

    fn keep(&mut self, key: (Pass, Target), code: Option<Arc<Code>>) -> Option<Arc<Code>> {
        // A page is the least that code takes; the key takes a little too.
        let bytes = code.as_ref().map_or(512, |code| code.bytes.next_multiple_of(4096));
        self.bytes += bytes;
        self.known.insert(key, Entry { code: code.clone(), bytes, used: self.clock });
        if self.bytes > CAPACITY {
            self.shrink();
        }
        code
    }

    /// Forgets the half that was not used for longest.
    fn shrink(&mut self) {
        let mut times: Vec<u64> = self.known.values().map(|entry| entry.used).collect();
        times.sort_unstable();
        let middle = times[times.len() / 2];
        self.known.retain(|_, entry| entry.used >= middle);
        self.bytes = self.known.values().map(|entry| entry.bytes).sum();
    }
}

/// Tells on stderr what was compiled.
pub(super) fn print(pass: &Pass, target: Target, listing: &[Instruction]) {
    let mut text = format!("kernel for {target:?}\n");
    for (i, input) in pass.inputs.iter().enumerate() {
        text += &format!("  %{i} = {} {}\n", input.dtype, if input.splat { "splat" } else { "load" });
    }
    for (i, step) in pass.steps.iter().enumerate() {
        let name = match step.call.op {
            Kernel::Unary(op) => op.name(),
            Kernel::Binary(op) => op.name(),
            Kernel::Select => "select",
            Kernel::Cast => "cast",
        };
        let args: Vec<String> = step.args.iter().map(|a| format!("%{a}")).collect();
        text += &format!("  %{} = {} {name} {}\n", pass.inputs.len() + i, step.call.to, args.join(" "));
    }
    for output in &pass.outputs {
        text += &match output {
            Output::Store { value, stream } => {
                format!("  {} %{value}\n", if *stream { "stream" } else { "store" })
            }
            Output::Fold { value, kind } => format!("  fold %{value} by {kind:?}\n"),
        };
    }
    let mut formatter = FastFormatter::new();
    for instruction in listing {
        text += &format!("  {:5x}  ", instruction.ip());
        formatter.format(instruction, &mut text);
        text.push('\n');
    }
    eprint!("{text}");
}
