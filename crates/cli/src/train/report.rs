//! How training goes, about twenty times per run. Reading a loss waits for the device, so it is not done at every step.

use kiln::Tensor;
use std::io::{IsTerminal, Write};
use std::time::Instant;

pub struct Report {
    every: u64,
    first: u64,
    last: u64,
    json: bool,
    live: bool,
    start: Instant,
}

impl Report {
    pub fn new(json: bool, first: u64, last: u64) -> Report {
        let live = !json && std::io::stderr().is_terminal();
        Report { every: (last / 20).max(1), first, last, json, live, start: Instant::now() }
    }

    pub fn step(&mut self, step: u64, loss: &Tensor) -> Result<(), kiln::Error> {
        if !step.is_multiple_of(self.every) && step != self.last {
            return Ok(());
        }
        let loss = loss.item::<f32>()?;
        let rate = (step - self.first) as f64 / self.start.elapsed().as_secs_f64();
        if self.json {
            println!("{}", serde_json::json!({ "step": step, "loss": loss, "steps_per_second": rate }));
        } else if self.live {
            eprint!("\rstep {step}/{}  loss {loss:.4}  {rate:.0} steps/s ", self.last);
            let _ = std::io::stderr().flush();
        } else {
            eprintln!("step {step}/{}  loss {loss:.4}  {rate:.0} steps/s", self.last);
        }
        Ok(())
    }

    pub fn done(&self) {
        if self.live {
            eprintln!();
        }
    }
}
